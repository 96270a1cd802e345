"""The optional packages, the extra of lineate that contains each, and the message about a missing one."""

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
"""The packages of each extra; a package of several extras is listed with the smallest."""
EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules}


def missing_module(error: ImportError) -> str | None:
    """Return the optional package that is missing according to an import error, or None.

    Args:
        error: The error.
    """
    module = (error.name or "").partition(".")[0]
    return module if module in EXTRA_OF else None


def not_installed(what: str, module: str, extra: str | None = None) -> str:
    """Return the message about a missing package: which command or module needs it, and how to install it.

    Args:
        what: The command or module that needs it, such as "lineate serve".
        module: The package.
        extra: The extra that contains it; None: the one in EXTRAS.
    """
    return f"{what} needs {module}, which is not installed; run pip install 'lineate[{extra or EXTRA_OF[module]}]'"
