"""Limits of one request, and the timeouts of clients."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of requests; a request above one of them gets an error that names it."""

    body_bytes: int = 8 * 2**20
    """Bytes of a body."""
    prompt_tokens: int | None = None
    """Tokens of a prompt; None: the engine's context."""
    new_tokens: int | None = None
    """Tokens to generate for one choice; None: the room in the context."""
    default_new_tokens: int = 2048
    """Default limit of the tokens to generate in a chat; fewer if the context has less room."""
    seconds: float = 600.0
    """Seconds from a request's arrival until it is ended with its tokens so far."""
    requests: int = 1024
    """Concurrent requests, including those in the queue."""
    choices: int = 128
    """Choices of one request: prompts times n; those above the slots wait in the queue."""
    echoed_logprobs: int = 2**17
    """Tokens of the prompts times n, if echo and logprobs request the log-probabilities of prompts."""
    stops: int = 16
    """Stop strings of one request."""
    stop_characters: int = 256
    """Characters of a stop string."""
    messages: int = 4096
    """Messages of one chat."""
    tools: int = 128
    """Tools of one request."""
    values: int = 2**17
    """Values in the JSON of a body, without the ids of prompts."""
    biases: int = 1024
    """Entries of logit_bias."""
    grammar_bytes: int = 256 * 2**10
    """Bytes of a JSON schema, of the schemas of required tools, and of the grammar made from them."""
    ids: int = 2**20
    """Ids that /detokenize takes, and /tokenize returns, at once."""
    head_seconds: float = 30.0
    """Seconds in which the head of a request must have arrived."""
    idle_seconds: int = 75
    """Seconds that an idle connection stays open: longer than clients keep theirs, so that the client closes it."""
    body_seconds: float = 30.0
    """Seconds in which a body must have arrived."""
    send_seconds: float = 60.0
    """Seconds in which a client must read some of the data sent to it."""
    drain_seconds: float = 30.0
    """Seconds that running requests have to end after SIGTERM."""
    heartbeat_seconds: float = 10.0
    """Seconds of silence after which a stream sends a comment, so that no proxy closes it."""

    progress_seconds: float = 5.0
    """Seconds after which a stream whose prompt is being read sends a comment with the tokens read so far."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
