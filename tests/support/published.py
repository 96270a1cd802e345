"""Small tokenizers of several kinds, saved as transformers saves those of published checkpoints."""

import base64

from tests.support.token_stores import bpe_texts

QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- "\\n" ~ (tool | tojson) }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and message.content is string and not message.content.startswith('<tool>') %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = message.content | map(attribute='text') | join('\\n') %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role in ['system', 'user', 'tool'] %}
        {{- '<|im_start|>%s\\n%s<|im_end|>\\n' % (message.role, content) }}
    {%- else %}
        {{- raise_exception('no role ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
KINDS = ("bytes", "bytes with bos", "pieces", "pieces with bytes")


def make_published(kind, folder, chat_template=CHAT, **options):
    """Save a tokenizer of one of KINDS to a folder; return it as transformers loads it from there."""
    import tokenizers
    import transformers
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

    texts = [
        *bpe_texts(),
        "system user assistant tool # Tools \n\n",
        "\u4e2d\u6587 \U0001f600\U0001f680 na\u00efve",
    ] * 3
    if kind.startswith("bytes"):
        engine = tokenizers.Tokenizer(models.BPE())
        split = pre_tokenizers.Split(tokenizers.Regex(QWEN_PIECES), "isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.normalizer = normalizers.NFC()
        engine.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
        engine.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        fallback = kind == "pieces with bytes"
        unknown = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else ["<unk>"]
        engine = tokenizers.Tokenizer(models.BPE(byte_fallback=fallback, unk_token=None if fallback else "<unk>"))
        engine.pre_tokenizer = pre_tokenizers.Metaspace()
        engine.decoder = decoders.Metaspace()
        if fallback:
            fuse = [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
            engine.decoder = decoders.Sequence(fuse)
        alphabet = list("abcdefghijklmnopqrstuvwxyz\u2581")
    special = [*SPECIAL, "<s>"] if kind == "bytes with bos" else SPECIAL
    trained = [] if kind.startswith("bytes") else unknown
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=sorted(alphabet), special_tokens=trained, show_progress=False
    )
    engine.train_from_iterator(texts, trainer)
    if kind == "pieces with bytes":  # bytes are ordinary tokens, as in sentencepiece
        import json

        value = json.loads(engine.to_str())
        value["added_tokens"] = []
        engine = tokenizers.Tokenizer.from_str(json.dumps(value))
    engine.add_special_tokens(special)
    engine.add_tokens([AddedToken(x, special=False, normalized=False) for x in ("<think>", "</think>")])
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | options
    if kind == "bytes with bos":
        names["bos_token"] = "<s>"
        engine.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", engine.token_to_id("<s>"))]
        )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **names)
    made.chat_template = chat_template
    made.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_ranks(folder, tokens, special=()):
    """Write a tiktoken model of these tokens, in the order of their ranks, as Kimi's folder has it."""
    import json

    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(tokens) + n): {"content": text, "special": True} for n, text in special}
    config = {
        "added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
