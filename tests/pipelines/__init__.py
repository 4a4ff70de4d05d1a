"""Real diffusers and transformers classes, tiny and from configs alone: autoencoders, text encoders, pipelines."""
