// The list of conversations: open, rename and delete them. On a narrow screen it slides over the page.

import { button, byId, make } from "./dom.js";

/** The list at the side. */
export class Sidebar {
  /** @param {object} actions functions: open(id), create(), rename(id, title), remove(id) */
  constructor(actions) {
    this.actions = actions;
    this.element = byId("sidebar");
    this.list = byId("conversations");
    this.opener = byId("open-sidebar");
    this.renaming = null;
    this.drawn = "";
    byId("new").addEventListener("click", () => { this.close(); actions.create(); });
    this.opener.addEventListener("click", () => this.open());
    byId("close-sidebar").addEventListener("click", () => this.close(true));
    byId("backdrop").addEventListener("click", () => this.close(true));
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.shown) {
        event.stopPropagation();
        this.close(true);
      }
    });
    this.wide = window.matchMedia("(min-width: 800px)");
    this.wide.addEventListener("change", () => this.close());
    this.close();
  }

  get shown() {
    return document.body.classList.contains("sidebar-open");
  }

  open() {
    this.show(true);
    byId("new").focus();
  }

  close(back = false) {
    const was = this.shown;
    this.show(false);
    if (was && back) this.opener.focus();
  }

  show(open) {
    document.body.classList.toggle("sidebar-open", open);
    this.opener.setAttribute("aria-expanded", String(open));
    byId("backdrop").hidden = !open;
    byId("main").inert = open;
    this.element.inert = !open && !this.wide.matches; // off the screen, it must not take the focus
  }

  /**
   * Draw the list.
   * @param {object[]} conversations in their order
   * @param {string} current id of the one that is shown
   * @param {(id: string) => boolean} running whether one has an answer being written
   */
  update(conversations, current, running) {
    const drawn = JSON.stringify([current, conversations.map((x) => [x.id, x.title, running(x.id)])]);
    if (drawn === this.drawn || this.renaming) return;
    const held = this.list.contains(document.activeElement) ? document.activeElement : null;
    const place = held && [held.closest("li").dataset.id, [".rename", ".delete"].find((x) => held.matches(x)) ?? ".open"];
    this.list.replaceChildren(...conversations.map((x) => this.row(x, x.id === current, running(x.id))));
    this.drawn = drawn;
    if (place) this.focus(...place);
  }

  focus(id, name) {
    const row = [...this.list.children].find((x) => x.dataset.id === id);
    (row?.querySelector(name) ?? byId("new")).focus();
  }

  row(conversation, current, running) {
    const { id, title } = conversation;
    const link = make("a.open", {
      href: `#${id}`, textContent: title, title,
      onclick: () => this.close(),
      ...(current ? { "aria-current": "page" } : {}),
    });
    if (running) link.append(make("span.dot", { title: "An answer is being written" }),
      make("span.visually-hidden", { textContent: " (an answer is being written)" }));
    return make("li", { "data-id": id }, link,
      button("Rename", () => this.rename(conversation), { className: "rename plain", "aria-label": `Rename ${title}` }),
      button("Delete", () => this.actions.remove(id), { className: "delete plain", "aria-label": `Delete ${title}` }));
  }

  rename({ id, title }) {
    const row = [...this.list.children].find((x) => x.dataset.id === id);
    const field = make("input", { type: "text", value: title, maxLength: 120, "aria-label": "Name of the conversation" });
    let open = true;
    const end = (keep) => {
      if (!open) return;
      open = false;
      this.renaming = null;
      this.drawn = "";
      this.actions.rename(id, keep && field.value.trim() ? field.value.trim() : title);
      this.focus(id, ".rename");
    };
    const form = make("form", {
      onsubmit: (event) => { event.preventDefault(); end(true); },
      onkeydown: (event) => {
        if (event.key !== "Escape") return;
        event.stopPropagation();
        end(false);
      },
      onfocusout: () => end(true),
    }, field);
    this.renaming = id;
    row.replaceChildren(form);
    field.select();
    field.focus();
  }
}
