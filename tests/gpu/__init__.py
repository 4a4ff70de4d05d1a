"""The matrix on a real accelerator: `python -m tests.gpu`, and over several releases `python -m tests.gpu.versions`."""
