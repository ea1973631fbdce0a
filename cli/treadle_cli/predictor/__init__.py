"""`treadle predictor`: what is learned from, and what is made of it."""
