// The server's side of the page: the models it has, and an answer as a stream of parts.

/** What went wrong with a request, in words for the reader. */
export class RequestError extends Error {
  /**
   * @param {string} message what happened
   * @param {{status?: number, retryAfter?: number}} details the HTTP status and the seconds the server asks to wait
   */
  constructor(message, { status = 0, retryAfter = 0 } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const WORDS = {
  400: "The server refused this request.",
  401: "The server wants an API key.",
  403: "The server does not allow this.",
  429: "The server has too many requests at the moment.",
  503: "The server cannot answer at the moment.",
};

const PATIENCE = 10_000; // milliseconds for questions about the server itself

const sentence = (words) => (/[.!?]$/.test(words) ? words : `${words}.`);

async function refused(response) {
  let said = "";
  try {
    const value = await response.json();
    const found = value?.error?.message ?? value?.detail;
    if (typeof found === "string") said = found;
  } catch {
    // The body is not JSON: the status has to do.
  }
  const words = WORDS[response.status] ?? `The server answered with status ${response.status}.`;
  const wait = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  return new RequestError(said ? `${words} It says: ${sentence(said)}` : words, {
    status: response.status,
    retryAfter: Number.isFinite(wait) && wait > 0 ? wait : 0,
  });
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server cannot be reached.");
  }
  if (!response.ok) throw await refused(response);
  return response;
}

const authorization = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/** Return the names of the server's models. */
export async function models(key) {
  const response = await request("v1/models", { headers: authorization(key), signal: AbortSignal.timeout(PATIENCE) });
  const value = await response.json();
  return Array.isArray(value?.data) ? value.data.map((model) => String(model.id)) : [];
}

/** Return how the server draws tokens where a request does not say it, by the names of requests; {} if it does not say. */
export async function samplingDefaults(key) {
  try {
    const response = await request("v1/models", { headers: authorization(key), signal: AbortSignal.timeout(PATIENCE) });
    return (await response.json())?.data?.[0]?.sampling_defaults ?? {};
  } catch {
    return {};
  }
}

/**
 * Return what is known of the model's layers: [{letter, label, kind}], kind "cache" if its bytes grow with the tokens.
 * A server that does not say has none.
 */
export async function layers(key) {
  let value;
  try {
    const response = await request("lineate/info", { headers: authorization(key), signal: AbortSignal.timeout(PATIENCE) });
    value = await response.json();
  } catch {
    return [];
  }
  return (Array.isArray(value?.layers) ? value.layers : []).map((layer) => ({
    letter: String(layer.letter ?? layer.label?.[0] ?? ""),
    label: String(layer.label ?? ""),
    kind: Number(layer.per_token) > 0 ? "cache" : "memory",
  }));
}

/** Yield the data of each server-sent event. */
export async function* serverSentEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A carriage return at the end may be the first half of a line's end.
      const whole = !done && rest.endsWith("\r") ? rest.slice(0, -1) : rest;
      const lines = whole.split(/\r\n|\n|\r/);
      rest = lines.pop() + rest.slice(whole.length);
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Ask for an answer and yield its parts: {text}, {reasoning}, {finish} and {usage}, one or more of them each.
 *
 * Throws a RequestError if the server refuses, reports an error, or ends the stream too early, and an AbortError if
 * `signal` stops it.
 * @param {object} body of the request, without what makes it a stream
 * @param {{key: string, signal: AbortSignal}} options
 */
export async function* complete(body, { key, signal }) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", Accept: "text/event-stream", ...authorization(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  const events = serverSentEvents(response.body);
  for (;;) {
    let next;
    try {
      next = await events.next();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new RequestError("The connection was lost before the answer was complete.");
    }
    if (next.done) throw new RequestError("The connection ended before the answer was complete.");
    if (next.value === "[DONE]") return;
    yield part(next.value);
  }
}

function part(data) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new RequestError("The server sent something that is not JSON.");
  }
  if (chunk.error) {
    const said = String(chunk.error.message ?? chunk.error);
    throw new RequestError(`The server stopped this answer. It says: ${sentence(said)}`, { status: Number(chunk.error.code) || 0 });
  }
  const choice = chunk.choices?.[0];
  const usage = chunk.usage ?? null;
  return {
    text: choice?.delta?.content ?? "",
    reasoning: choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "",
    finish: choice?.finish_reason ?? null,
    usage: usage && { ...usage, lineate: usage.lineate ?? chunk.lineate ?? null },
  };
}
