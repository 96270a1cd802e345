// Conversations are kept in the browser's storage, each under a key of its own, so that two tabs do not overwrite
// each other's. The API key is kept in the storage of the tab alone.

import { merge, readConversation } from "./tree.js";

const PREFIX = "lineate.conversation.";
const SETTINGS = "lineate.settings";
const KEY = "lineate.key";

/**
 * The conversations of this browser. Events: "changed" (another tab changed some) and "full" (the storage takes no more:
 * what could not be written stays in memory until the page closes).
 */
export class Store extends EventTarget {
  constructor() {
    super();
    this.all = new Map();
    this.busy = () => false; // whether this tab is writing an answer into a conversation
    for (let at = 0; at < localStorage.length; at += 1) {
      const name = localStorage.key(at);
      if (name.startsWith(PREFIX)) this.read(name, localStorage.getItem(name));
    }
    window.addEventListener("storage", ({ key: name, newValue }) => {
      if (name === null || name.startsWith(PREFIX)) this.changedElsewhere(name, newValue);
    });
  }

  read(name, text) {
    const conversation = text === null ? null : readConversation(text);
    if (!conversation || PREFIX + conversation.id !== name) return false;
    const own = this.get(conversation.id);
    if (own && this.busy(own.id)) {
      merge(own, conversation); // this tab is writing an answer into its copy
    } else {
      const those = Object.entries(own?.nodes ?? {}).filter(([id]) => id in conversation.nodes);
      if (own) merge(conversation, { nodes: Object.fromEntries(those) });
      this.all.set(conversation.id, conversation);
    }
    return true;
  }

  changedElsewhere(name, text) {
    if (name === null) this.all.clear();
    else if (!this.read(name, text)) this.all.delete(name.slice(PREFIX.length));
    this.dispatchEvent(new Event("changed"));
  }

  /** Return the conversations, the last used first. */
  list() {
    return [...this.all.values()].sort((a, b) => b.changed - a.changed || (a.id < b.id ? -1 : 1));
  }

  get(id) {
    return this.all.get(id) ?? null;
  }

  /** Keep a conversation as it is now. */
  save(conversation) {
    this.all.set(conversation.id, conversation);
    this.write(PREFIX + conversation.id, conversation);
  }

  remove(id) {
    this.all.delete(id);
    localStorage.removeItem(PREFIX + id);
  }

  /** The settings that a new conversation begins with: those last saved. */
  get settings() {
    try {
      const value = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
      return typeof value === "object" && value !== null ? value : {};
    } catch {
      return {};
    }
  }

  set settings(value) {
    this.write(SETTINGS, value);
  }

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  write(name, value) {
    try {
      localStorage.setItem(name, JSON.stringify(value));
    } catch {
      this.dispatchEvent(new Event("full"));
    }
  }
}
