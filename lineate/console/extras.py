"""The optional packages, the extra of lineate that brings each, and the one sentence about a missing one."""

EXTRAS = {
    "cli": ("typer", "rich"),
    "plot": ("matplotlib",),
    "lm": ("huggingface_hub",),
    "hf": ("transformers",),
    "train": ("numpy", "safetensors", "tensorboard"),
    "serve": (
        "fastapi", "starlette", "uvicorn", "pydantic_core", "prometheus_client", "jinja2", "llguidance", "tokenizers",
    ),
    "ray": ("ray",),
}  # fmt: skip
"""The packages that come with each extra; one that several bring stands with the smallest."""
EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules}


def missing_module(error: ImportError) -> str | None:
    """Return the optional package whose absence an error of an import is about, or None.

    Args:
        error: The error.
    """
    module = (error.name or "").partition(".")[0]
    return module if module in EXTRA_OF else None


def not_installed(what: str, module: str, extra: str | None = None) -> str:
    """Return the sentence that says what needs a package, and how to install it.

    Args:
        what: What needs it, such as "lineate serve".
        module: The package.
        extra: The extra that brings it; None: as EXTRAS says.
    """
    return f"{what} needs {module}, which is not installed; run pip install 'lineate[{extra or EXTRA_OF[module]}]'"
