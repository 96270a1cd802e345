"""Parts of commands: options from dataclasses, text in a terminal, spellings, extras that are missing."""
