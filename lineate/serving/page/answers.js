// The answers that are being written, at most one in each conversation; they go on while another one is shown.

import { Speaker, say } from "./announce.js";
import { RequestError, complete } from "./api.js";
import { add, continues, messages, path, remove, versions } from "./tree.js";
import { thoughtAndText } from "./turns.js";

const SAVE_EVERY = 1000; // milliseconds: what a reload in the middle of an answer can lose
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** Return the usage with {letter, label, kind, bytes} of each layer; some servers say only the bytes with each answer. */
function withLayers(usage, known) {
  const sizes = usage.lineate?.state_bytes;
  if (usage.lineate?.layers || !Array.isArray(sizes) || sizes.length !== known.length) return usage;
  const layers = known.map((layer, index) => ({ ...layer, bytes: sizes[index] }));
  return { ...usage, lineate: { ...usage.lineate, layers } };
}

/** Return the seed of a version of an answer: the first one has that of the settings, each later one the next. */
const seedOf = (seed, version) => (seed <= Number.MAX_SAFE_INTEGER - version ? seed + version : seed - version);

/** Events: "grown" (detail: the turn that has more text) and "ended" (detail: the conversation and the turn). */
export class Answers extends EventTarget {
  /**
   * @param {Store} store keeps the conversations
   * @param {object} options model(name): a promise of the model to ask if a conversation names this one; layers(): what is known
   *     of its layers; shown(id): whether the reader sees this conversation
   */
  constructor(store, { model, layers, shown }) {
    super();
    this.store = store;
    this.model = model;
    this.layers = layers;
    this.shown = shown;
    this.running = new Map();
    this.leaving = false; // whether the page is about to close, which ends all requests: they have not failed
    window.addEventListener("beforeunload", () => {
      this.leaving = true;
      for (const { conversation, node } of this.running.values()) {
        node.alive = 0;
        store.save(conversation);
      }
    });
    window.addEventListener("pageshow", () => { this.leaving = false; });
  }

  /** Return the turn that is being written in a conversation, or null. */
  node(id) {
    return this.running.get(id)?.node ?? null;
  }

  /** Stop the answer of a conversation; what it has so far is kept. */
  stop(id) {
    this.running.get(id)?.controller.abort();
  }

  /** Ask for an answer to a turn and write it into a new turn after it. */
  async start(conversation, question) {
    if (this.running.has(conversation.id)) return;
    const node = add(conversation, question.id, "assistant", "", "running");
    const own = { conversation, node, controller: new AbortController(), speaker: new Speaker(), saved: Date.now() };
    node.alive = own.saved;
    this.running.set(conversation.id, own);
    this.store.save(conversation);
    let how = "The answer is complete.";
    try {
      await this.write(own, path(conversation, question.id));
      node.status = "done";
    } catch (error) {
      how = this.fail(node, error);
    }
    this.running.delete(conversation.id);
    conversation.changed = Date.now();
    if (this.store.get(conversation.id)) this.store.save(conversation); // it may have been deleted in the meantime
    if (this.shown(conversation.id)) own.speaker.end(thoughtAndText(node)[1], how);
    else say(`In “${conversation.title}”: ${how}`);
    this.dispatchEvent(new CustomEvent("ended", { detail: { conversation, node } }));
  }

  /** Ask again for an answer that failed or that should be another one; an answer with text stays as a version. */
  again(conversation, node) {
    if (this.running.has(conversation.id)) return;
    const question = conversation.nodes[node.parent];
    if (node.text === "" && !node.reasoning && !continues(conversation, node)) remove(conversation, node);
    this.start(conversation, question);
  }

  async write(own, turns) {
    const { conversation, node, controller, speaker } = own;
    const { settings } = conversation;
    const model = await this.model(settings.model);
    const body = { ...(model ? { model } : {}), messages: messages(conversation, turns) };
    for (const name of SAMPLING) if (Number.isFinite(settings[name])) body[name] = settings[name];
    if ("seed" in body) body.seed = seedOf(body.seed, versions(conversation, node).indexOf(node));
    const begun = performance.now();
    const since = () => (performance.now() - begun) / 1000;
    for await (const part of complete(body, { key: this.store.key, signal: controller.signal })) {
      if ((part.text || part.reasoning) && !node.timing) node.timing = { first: since(), end: since() };
      node.text += part.text;
      node.reasoning += part.reasoning;
      if (part.finish) node.finish = part.finish;
      if (part.usage) node.usage = withLayers(part.usage, this.layers());
      if (node.timing && part.text) node.timing.end = since();
      if (part.text.includes("\n") && this.shown(conversation.id)) speaker.hear(thoughtAndText(node)[1]);
      if (Date.now() - own.saved > SAVE_EVERY) {
        own.saved = node.alive = Date.now(); // other tabs see that this one is at work
        this.store.save(conversation);
      }
      this.dispatchEvent(new CustomEvent("grown", { detail: node }));
    }
  }

  fail(node, error) {
    if (this.leaving) return "";
    if (error.name === "AbortError") {
      node.status = "stopped";
      return "The answer was stopped.";
    }
    node.status = "failed";
    node.error = { message: error.message, status: error.status ?? 0, retryAfter: error.retryAfter ?? 0 };
    if (!(error instanceof RequestError)) {
      console.error(error);
      node.error.message = `The page could not show this answer: ${error.message}`;
    }
    return node.error.message;
  }
}
