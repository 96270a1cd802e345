"""OpenAI's own JavaScript client in a browser, on a page of another origin than the server's.

`make` puts the package `openai` of npm into the virtual environment if it can; without it, these tests are skipped.
"""

import functools
import http.server
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from lineate.serving.api.service import Description
from lineate.serving.app import Settings
from tests.support.browser import started
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import ScriptedEngine, live, until

ROOT = Path(__file__).parents[2]
PLACES = [ROOT / ".venv/npm/node_modules/openai", ROOT / "node_modules/openai"]
TOOLS = """[{type: "function", function: {name: "look", parameters: {
    type: "object", properties: {place: {type: "string"}}}}}]"""
CALL = 'I look.\n\n<tool_call>\n{"name": "look", "arguments": {"place": "Tromsø"}}\n</tool_call>'
SCRIPT = {"say": "Hello, world. ø 🏔", "call": CALL, "cut": CALL, "wait": "A long answer."}


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves the package, and an empty page."""

    def guess_type(self, path):
        return "text/javascript" if str(path).endswith(".mjs") else "application/octet-stream"

    def do_GET(self):
        if self.path == "/":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>a page</title><link rel=icon href='data:,'>")
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def origin():
    package = next((x for x in PLACES if (x / "index.mjs").is_file()), None)
    if package is None:
        pytest.skip(
            f"OpenAI's JavaScript client is not installed: `npm install --prefix .venv/npm openai` ({PLACES[0]})"
        )
    handler = functools.partial(Files, directory=package)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        thread = threading.Thread(target=files.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{files.server_address[1]}"
        files.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def gate():
    gate = threading.Event()
    gate.set()
    yield gate
    gate.set()


@pytest.fixture
def engine(tokenizer, gate):
    def written(request, index):
        asked = tokenizer.decode(request.ids, keep_special=True).split("user\n")[-1].partition("<|im_end|>")[0]
        return SCRIPT[asked]

    return ScriptedEngine(tokenizer.encode_rendered, written, gate=gate, free=2)


@pytest.fixture(scope="module")
def page(origin):
    with started() as browser:
        context = browser.new_context()
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.goto(origin)
        yield page
        context.close()


@pytest.fixture
def run(page, origin, engine, tokenizer):
    """Run the body of an async function that has a client, and return its result."""
    description = Description("scripted", context=4000, slots=4, created=0, fingerprint="x")
    with live(engine, tokenizer, description, Settings(cors=(origin,), api_keys=("key",))) as server:

        def call(body, key="key"):
            return page.evaluate(
                """async ([address, key, body]) => {
                    const {default: OpenAI} = await import("/index.mjs");
                    const client = new OpenAI({baseURL: address + "/v1", apiKey: key, maxRetries: 0,
                                               dangerouslyAllowBrowser: true});
                    const ask = (text, more) => ({
                        model: "scripted", messages: [{role: "user", content: text}], ...more});
                    const work = Object.getPrototypeOf(async () => {}).constructor;
                    return await work("OpenAI", "client", "ask", body)(OpenAI, client, ask);
                }""",
                [server.url, key, body],
            )

        yield call


def test_a_stream(run, page):
    sent = []
    page.on("request", lambda request: sent.append(request.headers))
    found = run("""
        const chunks = [];
        for await (const chunk of await client.chat.completions.create(
            ask("say", {stream: true, stream_options: {include_usage: true}}))) chunks.push(chunk);
        return {text: chunks.map(x => x.choices[0]?.delta?.content ?? "").join(""), usage: chunks.at(-1).usage,
                finish: chunks.map(x => x.choices[0]?.finish_reason).filter(Boolean)};
    """)
    assert found["text"] == SCRIPT["say"] and found["finish"] == ["stop"] and found["usage"]["completion_tokens"] > 5
    assert any(name.startswith("x-stainless-") for headers in sent for name in headers)  # so a preflight came first


def test_calls_in_a_stream_and_at_once(run):
    found = run(f"""
        const stream = client.chat.completions.stream(ask("call", {{tools: {TOOLS}}}));
        const streamed = (await stream.finalChatCompletion()).choices[0];
        const whole = (await client.chat.completions.create(ask("call", {{tools: {TOOLS}}}))).choices[0];
        const plain = x => [x.finish_reason, x.message.content,
            x.message.tool_calls.map(call => [call.type, call.function.name, call.function.arguments])];
        return [plain(streamed), plain(whole)];
    """)
    expected = ["tool_calls", "I look.", [["function", "look", '{"place": "Tromsø"}']]]
    assert found == [expected, expected]


def test_a_call_that_is_cut(run):
    found = run(f"""
        let text = "", given = "", finish = null;
        for await (const chunk of await client.chat.completions.create(
            ask("cut", {{tools: {TOOLS}, stream: true, max_tokens: 55}}))) {{
            const choice = chunk.choices[0];
            text += choice.delta.content ?? "";
            given += choice.delta.tool_calls?.[0].function.arguments ?? "";
            finish = choice.finish_reason ?? finish;
        }}
        return [text, given, finish];
    """)
    assert found[0] == "I look." and found[2] == "length"
    assert found[1] and '{"place": "Tromsø"}'.startswith(found[1])


def test_errors(run):
    found = run("""
        const caught = [];
        for (const more of [{temperature: 3}, {model: "gpt-4"}, {guided_json: {type: "object"}}]) {
            try { await client.chat.completions.create(ask("say", more)); caught.push(null); }
            catch (error) {
                caught.push([error instanceof OpenAI.APIError, error.status, error.param, error.message,
                             error.requestID?.startsWith("req_")]);
            }
        }
        return caught;
    """)
    assert [x[:3] for x in found] == [
        [True, 400, "temperature"], [True, 404, "model"], [True, 400, "guided_json"]
    ]  # fmt: skip
    assert "from 0 to 2, got 3" in found[0][3] and "use response_format" in found[2][3]
    assert all(x[4] for x in found)  # the page may read the id of the request
    wrong = run("try { await client.models.list() } catch (error) { return [error.status, error.code] }", key="x")
    assert wrong == [401, "invalid_api_key"]


def test_headers_that_a_page_may_read(run):
    found = run("""
        const {data, response} = await client.chat.completions.create(ask("say", {mirostat: 0})).withResponse();
        const after = await client.chat.completions.create(
            ask("say", {messages: [{role: "user", content: "hi"}, data.choices[0].message,
                                   {role: "user", content: "say"}]}));
        return [response.headers.get("x-lineate-ignored"), after.choices[0].message.content];
    """)
    assert found == ["mirostat", SCRIPT["say"]]


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_frees_the_slot(run, engine, gate, stream):
    gate.clear()
    found = run(f"""
        const stopping = new AbortController();
        setTimeout(() => stopping.abort(), 300);
        try {{
            const made = await client.chat.completions.create(ask("wait", {{stream: {str(stream).lower()}}}),
                                                              {{signal: stopping.signal}});
            let text = "";
            for await (const chunk of made) text += chunk.choices[0].delta.content ?? "";
            return ["ended", text];
        }} catch (error) {{ return [error.constructor.name, error instanceof OpenAI.APIUserAbortError]; }}
    """)
    assert found == (["ended", "A "] if stream else ["APIUserAbortError", True])
    until(lambda: engine.running == 0, "the end of the request")
    assert engine.handles[-1].ending == {0: "cancelled"}
