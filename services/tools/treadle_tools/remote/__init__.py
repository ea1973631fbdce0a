"""GPU services: models that share GPUs, brought into memory when they are asked (ARL-Tangram §5.3)."""
