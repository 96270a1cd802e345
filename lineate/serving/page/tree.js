// A conversation is a tree of turns: editing a turn or asking for another answer adds a version beside the old one.
//
// conversation = {id, title, named, created, changed, settings, draft, nodes: {id: node}, chosen: {id or "root": id}}
// node = {id, parent, role, text, reasoning, status, error, finish, usage, timing, created}
//
// `chosen` says which version of each turn is shown. status: "done", "running", "stopped" or "failed".

const ROOT = "root";

/** Return an id that no other conversation or turn has. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9)); // randomUUID exists only where the page came over https
  return Array.from(bytes, (byte) => byte.toString(36).padStart(2, "0")).join("");
}

/** Return a conversation without turns. */
export function newConversation(settings = {}) {
  const now = Date.now();
  return {
    id: newId(), title: "New conversation", named: false, created: now, changed: now,
    settings: { ...settings }, draft: "", nodes: {}, chosen: {},
  };
}

/** Return a conversation from storage, or null if it is not one. */
export function readConversation(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return null;
  }
  const is = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
  if (!is(value) || typeof value.id !== "string" || !is(value.nodes) || !is(value.chosen)) return null;
  const good = (node) => is(node) && typeof node.text === "string" && (node.role === "user" || node.role === "assistant");
  if (!Object.values(value.nodes).every(good)) return null;
  return {
    ...newConversation(is(value.settings) ? value.settings : {}), ...value,
    title: String(value.title ?? ""), draft: String(value.draft ?? ""), changed: Number(value.changed) || 0,
  };
}

/** Return the turns that are shown, from the first to the last, or up to one of them. */
export function path(conversation, last = null) {
  const found = [];
  if (last !== null) {
    for (let node = conversation.nodes[last]; node; node = conversation.nodes[node.parent]) found.unshift(node);
    return found;
  }
  let id = conversation.chosen[ROOT];
  while (id !== undefined && conversation.nodes[id] && found.length <= Object.keys(conversation.nodes).length) {
    found.push(conversation.nodes[id]);
    id = conversation.chosen[id];
  }
  return found;
}

/** Return the versions of a turn, oldest first. */
export function versions(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent && other.role === node.role);
}

/** Show this version of a turn. */
export function choose(conversation, node) {
  conversation.chosen[node.parent ?? ROOT] = node.id;
}

/** Add a turn after `parent` (null: the first turn) and show it. */
export function add(conversation, parent, role, text, status = "done") {
  const node = { id: newId(), parent, role, text, reasoning: "", status, created: Date.now() };
  conversation.nodes[node.id] = node;
  choose(conversation, node);
  conversation.changed = node.created;
  if (!conversation.named && parent === null && role === "user") conversation.title = titleOf(text);
  return node;
}

/** Take turns of another tab's copy of a conversation into this one, where they are new or further than here. */
export function merge(conversation, other) {
  const behind = (own, theirs) =>
    own.status === "running" && (theirs.status !== "running" || theirs.text.length > own.text.length);
  for (const [id, theirs] of Object.entries(other.nodes)) {
    const own = conversation.nodes[id];
    if (own === undefined) conversation.nodes[id] = theirs;
    else if (behind(own, theirs)) Object.assign(own, theirs);
  }
}

/** Whether turns follow this one. */
export function continues(conversation, node) {
  return Object.values(conversation.nodes).some((other) => other.parent === node.id);
}

/** Remove a turn without later turns, such as a failed answer without text. */
export function remove(conversation, node) {
  delete conversation.nodes[node.id];
  delete conversation.chosen[node.parent ?? ROOT];
  const left = versions(conversation, node).at(-1);
  if (left) choose(conversation, left);
}

/** Return a new conversation with the turns up to this one; the original stays as it is. */
export function fork(conversation, node) {
  const own = newConversation(conversation.settings);
  let parent = null;
  for (const turn of path(conversation, node.id)) {
    const copied = { ...structuredClone(turn), id: newId(), parent };
    own.nodes[copied.id] = copied;
    choose(own, copied);
    parent = copied.id;
  }
  own.title = `${conversation.title.replace(/ \(fork\)$/, "")} (fork)`;
  own.named = true;
  return own;
}

/** Return the messages that the server reads to answer after these turns. */
export function messages(conversation, turns) {
  const said = turns.filter((turn) => turn.role === "user" || turn.text !== "");
  const system = (conversation.settings.system ?? "").trim();
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...said.map((turn) => ({ role: turn.role, content: turn.text })),
  ];
}

function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 48 ? `${line.slice(0, 47)}…` : line || "New conversation";
}
