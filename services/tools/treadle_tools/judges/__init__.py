"""LLM judges: rewards that a model gives."""
