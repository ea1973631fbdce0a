"""Run `treadle predictor`: gather what it learns from, and train, evaluate and export
predictors."""
