"""What one request may ask for, and how long the server waits for a client."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of requests; a request above one of them gets an error that names it."""

    body_bytes: int = 8 * 2**20
    """Bytes of a body."""
    prompt_tokens: int | None = None
    """Tokens of a prompt; None for as many as the engine's context has room for."""
    new_tokens: int | None = None
    """Tokens to generate for one choice; None for as many as the context has room for."""
    default_new_tokens: int = 2048
    """Tokens to generate at most if a chat request does not say; fewer if the context has less room."""
    seconds: float = 600.0
    """Seconds from a request's arrival until it is ended, with what it has generated."""
    requests: int = 1024
    """Requests that are answered at once, those that wait included."""
    choices: int = 128
    """Choices of one request: prompts times n; those above the slots wait in the queue."""
    echoed_logprobs: int = 2**17
    """Tokens of the prompts times n, if echo and logprobs ask for the log-probabilities of prompts."""
    stops: int = 16
    """Stop strings of one request."""
    stop_characters: int = 256
    """Characters of a stop string."""
    messages: int = 4096
    """Messages of one chat."""
    tools: int = 128
    """Tools of one request."""
    values: int = 2**17
    """Values in the JSON of a body, besides the ids of prompts."""
    biases: int = 1024
    """Entries of logit_bias."""
    grammar_bytes: int = 256 * 2**10
    """Bytes of a JSON schema, of the schemas of the tools that must be called, and of the grammar made from them."""
    ids: int = 2**20
    """Ids that /detokenize takes, and /tokenize returns, at once."""
    head_seconds: float = 30.0
    """Seconds in which the head of a request must have arrived."""
    idle_seconds: int = 75
    """Seconds that a connection without a request stays open: more than clients keep theirs, so that they close it."""
    body_seconds: float = 30.0
    """Seconds in which a body must have arrived."""
    send_seconds: float = 60.0
    """Seconds that a client may take none of what is sent to it."""
    drain_seconds: float = 30.0
    """Seconds that running requests have to end after SIGTERM."""
    heartbeat_seconds: float = 10.0
    """Seconds of silence after which a stream sends a comment, so that no proxy closes it."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
