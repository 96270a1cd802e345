// The dialogs: settings of a conversation, and the question before something is deleted.

import { byId, make } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/**
 * Show the settings and call `save` with the new ones and the API key, unless the reader cancels.
 * @param {object} options settings, models (their names), defaults (of the server, by field), key, and wantsKey: whether
 * the server asked for a key
 */
export function editSettings({ settings, models, defaults = {}, key, wantsKey }, save) {
  const dialog = byId("settings");
  const form = byId("settings-form");
  const fields = form.elements;
  const names = settings.model && !models.includes(settings.model) ? [...models, settings.model] : models;
  fields.model.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
  fields.model.value = settings.model || models[0] || "";
  byId("model-field").hidden = names.length < 2;
  fields.system.value = settings.system ?? "";
  for (const name of NUMBERS) {
    fields[name].value = settings[name] ?? "";
    if (Number.isFinite(defaults[name])) fields[name].placeholder = `${defaults[name]} if empty`;
  }
  byId("key-field").hidden = !wantsKey && !key;
  fields.key.value = key;
  form.onsubmit = (event) => {
    event.preventDefault();
    const values = { system: fields.system.value };
    if (names.length > 1) values.model = fields.model.value;
    for (const name of NUMBERS) if (fields[name].value !== "") values[name] = fields[name].valueAsNumber;
    dialog.close();
    save(values, fields.key.value.trim());
  };
  byId("cancel-settings").onclick = () => dialog.close();
  dialog.showModal();
}

/** Ask a question whose answer deletes something; call `then` if it is yes. */
export function confirmDelete(question, then) {
  const dialog = byId("confirm");
  byId("confirm-text").textContent = question;
  byId("confirm-form").onsubmit = (event) => {
    event.preventDefault();
    dialog.close();
    then();
  };
  byId("confirm-no").onclick = () => dialog.close();
  dialog.showModal();
}
