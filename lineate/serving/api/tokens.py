"""/tokenize and /detokenize: a text or a chat as ids, and back."""

from starlette.requests import Request
from starlette.responses import Response

from lineate.serving.api.messages import read_messages, read_tools
from lineate.serving.api.schemas import check_model, is_token
from lineate.serving.api.service import Service
from lineate.text.bounded import TooManyTokens
from lineate.web.errors import invalid
from lineate.web.fields import Fields, shown
from lineate.web.responses import answer


async def tokenize(service: Service, request: Request, body: bytes) -> Response:
    """Return the ids of `prompt`, or of `messages` as the template renders them."""

    def made(fields: Fields) -> Response:
        check_model(fields, service.server)
        most = service.limits.ids
        try:
            if fields.take("messages") is not None:
                param = "messages"
                messages, tools = read_messages(fields, service.limits), read_tools(fields, service.limits)
                fields.finish()
                ids = service.chat_ids(messages, tools, {}, most)
            else:
                param, (text, starts) = "prompt", _prompt(fields)
                start = service.tokenizer.start if starts else ()
                ids = (*start, *service.tokenizer.encode_within(text, most))
        except TooManyTokens:
            message = f"{param} must have at most {most} tokens, got more"
            raise invalid(param, message, "string_above_max_length") from None
        texts = [service.tokenizer.shown_bytes(i, True).decode("utf-8", "replace") for i in ids]
        context = service.description.context
        return answer({"count": len(ids), "max_model_len": context, "tokens": ids, "texts": texts})

    return await service.prepare(body, made)


def _prompt(fields: Fields) -> tuple[str, bool]:
    fields.needed("prompt", "a string, unless there are messages")
    text, starts = fields.text("prompt"), fields.flag("add_special_tokens", True)
    fields.finish()
    return text or "", starts


async def detokenize(service: Service, request: Request, body: bytes) -> Response:
    """Return the text of `tokens`, with special tokens written out."""

    def made(fields: Fields) -> Response:
        check_model(fields, service.server)
        fields.needed("tokens", "a list of ids")
        ids = fields.items("tokens", service.limits.ids) or []
        fields.finish()
        size = service.tokenizer.vocab_size
        for n, token in enumerate(ids):
            if not is_token(token, size):
                where = f"tokens[{n}]"
                raise invalid(where, f"{where} must be an id below {size}, got {shown(token)}", "invalid_value")
        return answer({"prompt": service.tokenizer.decode(ids, keep_special=True)})

    return await service.prepare(body, made, service.limits.ids)
