"""Evidence from tensors: what a run's attention does, and where it breaks. Takes models, never the training loop."""
