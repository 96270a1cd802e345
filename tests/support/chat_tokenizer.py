"""A small tokenizer with control tokens and a chat template, like those of published checkpoints."""

import json

from lineate.text.published import PublishedTokenizer

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tokens of their own that are not control tokens, as in Qwen's tokenizers."""
FORMS = {
    "json": 'Answer <tool_call>{"name": ..., "arguments": ...}</tool_call>.',
    "tags": "Answer <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>.",
    "kimi": "Answer <|tool_call_begin|>NAME<|tool_call_argument_begin|>{}<|tool_call_end|>.",
}
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\nFORM"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nTHINK{% endif %}"
)


def chat_tokenizer(form: str = "json", think: str = "") -> PublishedTokenizer:
    """Return a tokenizer of 256 bytes and the tokens above.

    Args:
        form: How its template asks for calls.
        think: What its template begins an answer with, such as "<think>\\n".
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE({text: n for n, text in enumerate(alphabet)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    engine.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    template = TEMPLATE.replace("FORM", FORMS[form]).replace("THINK", think)
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    return PublishedTokenizer(
        {"tokenizer.json": engine.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    )
