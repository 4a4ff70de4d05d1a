"""The entry point for autowrapt, which calls it when `diffusers` is imported in an interpreter that asks for it."""


def bootstrap(module: object) -> None:
    """Activate. Importing this module has done so already; autowrapt needs something to call."""
