// The server: requests with the key, events of a stream, and errors for people. Below them, helpers for all elements.

const KEY = "kvtool-key";
let memory = ""; // the key where the browser has no storage for this page
let asking = null; // the key's dialog, while it is open
let timer = 0;

export const $ = (id) => document.getElementById(id);

export class Failure extends Error {
  constructor(message, { status = 0, code = "", retry = 0 } = {}) {
    super(message);
    Object.assign(this, { status, code, retry });
  }
}

// ---- requests ----

function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? memory;
  } catch {
    return memory;
  }
}

function keepKey(key) {
  memory = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {} // a browser that keeps nothing: the key lasts as long as the page
}

/** Ask for the key until the dialog is closed; all requests wait for one dialog. */
function askKey(wrong) {
  if (asking) return asking;
  const dialog = $("key");
  $("key-wrong").textContent = wrong ? "The server does not know this key." : "";
  $("key-text").value = "";
  asking = new Promise((resolve, reject) => {
    dialog.onclose = () => {
      asking = null;
      const key = $("key-text").value.trim();
      $("key-text").value = "";
      if (dialog.returnValue !== "use") {
        reject(new Failure("Without the API key this server answers nothing.", { status: 401 }));
        return;
      }
      keepKey(key);
      resolve();
    };
  });
  dialog.returnValue = "";
  dialog.showModal();
  return asking;
}

/** Send a request, with the key; ask for the key if the server wants one. Throws Failure. */
export async function request(path, init = {}) {
  for (;;) {
    const key = readKey();
    const headers = { ...init.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    let reply;
    try {
      reply = await fetch(path, { ...init, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw gone();
    }
    back();
    if (reply.ok) return reply;
    if (reply.status !== 401) throw await failureOf(reply.status, await reply.text(), reply.headers.get("Retry-After"));
    if (key === readKey()) await askKey(key !== "");
  }
}

/** Post JSON, and report how much of it is sent, from 0 to 1: what `fetch` cannot tell. */
export function upload(path, value, progress) {
  return new Promise((resolve, reject) => {
    const sending = new XMLHttpRequest();
    sending.open("POST", path);
    sending.setRequestHeader("Content-Type", "application/json");
    if (readKey()) sending.setRequestHeader("Authorization", `Bearer ${readKey()}`);
    sending.upload.onprogress = (event) => progress(event.total ? event.loaded / event.total : 0);
    sending.upload.onload = () => progress(1);
    sending.onerror = () => reject(gone());
    sending.onload = () => {
      if (sending.status === 200) resolve(JSON.parse(sending.responseText));
      else reject(failureOf(sending.status, sending.responseText, sending.getResponseHeader("Retry-After")));
    };
    sending.send(JSON.stringify(value));
  });
}

function failureOf(status, text, retry) {
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {} // of a proxy
  const message = error.message ?? `The server answered with status ${status}.`;
  return new Failure(sentence(message), { status, code: error.code, retry: Number(retry) || 0 });
}

/** Yield the objects of a stream of events. Throws Failure if it breaks off. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw gone();
    }
    if (part.done) throw gone();
    const lines = (rest + part.value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

/** Show that the server is gone, and look for it every few seconds. Returns the Failure. */
function gone() {
  $("gone").hidden = false;
  timer ||= setInterval(look, 3000);
  return new Failure("The server does not answer.", { code: "gone" });
}

export async function look() {
  try {
    await fetch("health", { cache: "no-store" });
  } catch {
    return;
  }
  back();
}

function back() {
  if ($("gone").hidden) return;
  clearInterval(timer);
  timer = 0;
  $("gone").hidden = true;
  document.dispatchEvent(new Event("server-back"));
}

// ---- elements ----

/** Make an element. `attributes`: `onclick` and the like are listeners, `true` is one without a value. */
export function h(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null && child !== false));
  return node;
}

/** Return the language of a text as far as its script tells it; "" if it may be any. */
export function langOf(text) {
  if (/\p{Script=Hangul}/u.test(text)) return "ko";
  if (/[\p{Script=Hiragana}\p{Script=Katakana}]/u.test(text)) return "ja";
  if (/\p{Script=Han}/u.test(text)) return "zh";
  return "";
}

/** Return the attributes of an element for foreign text. */
export const foreign = (text, more) => ({ lang: langOf(text), dir: "auto", ...more });

export const counted = (number) => Math.round(number).toLocaleString("en");
export const plural = (number, word) => `${counted(number)} ${word}${number === 1 ? "" : "s"}`;
export const sentence = (text) => {
  const [first = "", ...rest] = text;
  const said = first.toUpperCase() + rest.join("");
  return /[.!?)]$/.test(said) ? said : `${said}.`;
};
export const seconds = (ms) =>
  ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
export function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(bytes, 1)) / 3));
  return `${(bytes / 1000 ** power).toFixed(power && bytes / 1000 ** power < 10 ? 1 : 0)} ${units[power]}`;
}
