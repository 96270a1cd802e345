// Where answers come from: the server, or files in a copy of the page that was made by lineate explore --export.

let kept = null; // [{ path, body, file, item }], the answers of a copy
const files = new Map();

const LIVE_ONLY = "This page is a copy without a server, and it keeps no answer for that. Run lineate explore to compute it.";

async function json(path) {
  const reply = await fetch(path);
  if (!reply.ok) throw new Error(`status ${reply.status}`);
  return reply.json();
}

/** Return what the page offers. In a copy, `kept` says what is in it. */
export async function begin() {
  const about = await json("api/about");
  if (about.kept) kept = await json(about.kept.index);
  return about;
}

/** Whether two values of JSON are the same, whatever the order of their fields. */
function same(one, other) {
  if (one === null || other === null || typeof one !== "object" || typeof other !== "object") return one === other;
  const keys = Object.keys(one);
  return keys.length === Object.keys(other).length && keys.every((key) => key in other && same(one[key], other[key]));
}

async function keptAnswer(path, body) {
  const found = kept.find((entry) => entry.path === path && same(entry.body, body));
  if (!found) throw new Error(LIVE_ONLY);
  if (!files.has(found.file)) files.set(found.file, json(found.file));
  return (await files.get(found.file))[found.item];
}

/** Return the answer to a question; an error has a message for the reader. */
export async function answerTo(path, body) {
  if (kept) return keptAnswer(path, JSON.parse(JSON.stringify(body)));
  let reply;
  let value;
  try {
    reply = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    value = await reply.json();
  } catch (error) {
    throw new Error(`lineate explore does not answer (${error.message}); is it still running?`);
  }
  if (!reply.ok) throw new Error(value.error.message);
  return value;
}
