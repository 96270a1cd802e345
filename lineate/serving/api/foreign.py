"""Fields of other servers: those accepted without effect, and those refused because the answer depends on them.

Clients of vLLM, llama.cpp and Ollama send fields that OpenAI's API lacks. Those in the tables below are ignored; the
header `X-Lineate-Ignored` of the answer and a line in the log name them. A field that changes the answer or its input
is refused unless its value is neutral. Unknown fields are errors, because they are typos.
"""

import logging
from typing import Any

from lineate.web.errors import invalid
from lineate.web.fields import Fields

LOG = logging.getLogger("lineate.serving")
HEADER = "X-Lineate-Ignored"
EXPOSED = ("X-Request-Id", "Retry-After", HEADER)
"""Headers of answers that pages of other sites may read, if they may call the server."""

OPENAI = (
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user", "verbosity",
)  # fmt: skip
"""Fields of OpenAI's API without effect here: bookkeeping of an account, and hints about speed and style."""
VLLM = (
    "cache_salt", "detokenize", "early_stopping", "include_reasoning", "kv_transfer_params", "length_penalty",
    "mm_processor_kwargs", "priority", "repetition_detection", "request_id", "return_token_ids",
    "return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "thinking_token_budget",
    "vllm_xargs",
)  # fmt: skip
LLAMA_CPP = (
    "adaptive_decay", "adaptive_target", "cache_prompt", "chat_format", "dry_allowed_length", "dry_base",
    "dry_multiplier", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent", "dynatemp_range",
    "id_slot", "min_keep", "mirostat", "mirostat_eta", "mirostat_tau", "n_cache_reuse", "n_discard", "n_indent",
    "n_keep", "n_probs", "parse_tool_calls", "penalize_nl", "post_sampling_probs", "reasoning_format",
    "repeat_last_n", "repeat_penalty", "response_fields", "return_progress", "return_tokens", "samplers",
    "sse_ping_interval", "t_max_predict_ms", "t_max_prompt_ms", "tfs_z", "thinking_budget_tokens",
    "thinking_forced_open", "timings_per_token", "top_n_sigma", "typ_p", "typical_p", "xtc_probability",
    "xtc_threshold",
)  # fmt: skip
OLLAMA = ("keep_alive", "think", "truncate")
IGNORED = frozenset((*VLLM, *LLAMA_CPP, *OLLAMA))

_FORMAT = "use response_format"
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "guided_json": (_FORMAT, ()),
    "guided_regex": ("use response_format with a schema that has a pattern", ()),
    "guided_choice": ("use response_format with a schema that has an enum", ()),
    "guided_grammar": (_FORMAT, ()),
    "structured_outputs": (_FORMAT, ()),
    "grammar": (_FORMAT, ("",)),
    "json_schema": (_FORMAT, ()),
    "format": (_FORMAT, ("",)),
    "allowed_token_ids": ("use logit_bias", ()),
    "bad_words": ("use logit_bias", ([],)),
    "include_stop_str_in_output": ("a stop string ends the text, which does not contain it", (False,)),
    "truncate_prompt_tokens": ("prompts are read whole; shorten the prompt", ()),
    "add_special_tokens": ("the template writes the tokens that a chat begins with", (False,)),
    "options": ("send each option as a field of the body, under its name in OpenAI's API", ({},)),
    "min_tokens": ("use logit_bias for the end token", (0,)),
    "use_beam_search": ("tokens are sampled", (False,)),
    "prompt_logprobs": ("use echo with logprobs at /v1/completions", ()),
    "prompt_embeds": ("prompts are texts or ids", ()),
    "documents": ("use chat_template_kwargs", ([],)),
    "echo": ("use /v1/completions", (False,)),
    "lora": ("the model has no adapters", ([],)),
    "raw": ("use /v1/completions for a text without a template", (False,)),
    "images": ("the model reads text", ([],)),
    "image_data": ("the model reads text", ([],)),
    "multi_modal_data": ("the model reads text", ()),
    "chat_template": ("the model's own template is used", ()),
    "add_generation_prompt": ("an answer always begins a new message", (True,)),
    "continue_final_message": ("an answer always begins a new message", (False,)),
}
"""The reason for refusing a field or its replacement, and the neutral values."""
OF_MESSAGES = frozenset(
    ("annotations", "cache_control", "id", "model", "parsed", "phase", "reasoning_details", "weight")
)
"""Parts of messages that the model does not see."""


def accept_foreign(fields: Fields) -> tuple[str, ...]:
    """Accept the fields of a body that other servers know; return those that would have had an effect there.

    Raises ApiError for a field that would change the answer.

    Args:
        fields: The body, after all fields of this server were read.
    """
    fields.ignore(*OPENAI)
    ignored = []
    for name, value in fields.unread:
        if name in REFUSED:
            why, nothing = REFUSED[name]
            if not any(type(x) is type(value) and x == value for x in nothing):
                raise invalid(name, f"{name} is not supported: {why}", "unsupported_parameter")
            fields.ignore(name)
        elif name in IGNORED:
            fields.ignore(name)
            ignored.append(name)
    if ignored:
        _tell(tuple(ignored))
    return tuple(ignored)


told: set[str] = set()
"""Fields that a warning has already named; a subset of IGNORED."""


def _tell(ignored: tuple[str, ...]) -> None:
    """Log the ignored fields: as a warning at their first occurrence, later for debugging."""
    new = [name for name in ignored if name not in told]
    told.update(new)
    old = [name for name in ignored if name not in new]
    for level, names in ((logging.WARNING, new), (logging.DEBUG, old)):
        if names:
            LOG.log(level, "a request has fields that are ignored: %s", ", ".join(names))
