// The server: requests with the key, events of a stream, and its errors for people.

import { $, put } from "./elements.js";
import { counted, join, sentence, t } from "./text.js";

const KEY = "kvtool-key";
let memory = ""; // the key where the browser has no storage for this page
let asking = null; // the key's dialog, while it is open
let isLocked = false; // the reader has closed that dialog, and no key has worked since
let timer = 0;

/** What went wrong. `said`: the message in the language of the page, where it has one. */
export class Failure extends Error {
  constructor(said, { status = 0, code = "", retry = 0 } = {}) {
    super(String(said));
    Object.assign(this, { said, status, code, retry });
  }
}

export const why = (error) => error.said ?? t("The server’s answer cannot be read: {0}.", error.message);

// ---- the key ----

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

/** Take the key from an address that ends with `#key=…`, and remove it there. Returns whether there was one. */
export function takeKey() {
  const found = /^#key=(.*)$/.exec(location.hash);
  if (!found) return false;
  history.replaceState(null, "", location.pathname + location.search);
  let key = found[1];
  try {
    key = decodeURIComponent(key);
  } catch {} // a key with a percent sign of its own
  if (!/^[!-~]+$/.test(key)) return false;
  keepKey(key);
  if (asking) {
    $("key-text").value = key;
    $("key").close("use");
  }
  return true;
}

/** Ask for the key until the dialog is closed; all requests wait for one dialog. */
function askKey(wrong) {
  if (asking) return asking;
  const dialog = $("key");
  put($("key-wrong"), wrong && t("The server does not know this key."));
  $("key-text").value = "";
  asking = new Promise((resolve, reject) => {
    dialog.onclose = () => {
      asking = null;
      const key = $("key-text").value.trim();
      $("key-text").value = "";
      if (dialog.returnValue !== "use") {
        isLocked = true;
        reject(new Failure(t("Without the API key this server answers nothing."), { status: 401 }));
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

function unlock() {
  if (!isLocked) return;
  isLocked = false;
  document.dispatchEvent(new Event("unlocked"));
}

// ---- requests ----

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
    if (reply.status !== 401) unlock();
    if (reply.ok) return reply;
    if (reply.status !== 401) throw await failureOf(reply.status, await reply.text(), reply.headers.get("Retry-After"));
    if (key !== readKey()) continue; // another request has asked meanwhile
    if (key) keepKey(""); // a wrong one is not kept
    await askKey(key !== "");
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
      if (sending.status === 200) resolve(sending.responseText);
      else reject(failureOf(sending.status, sending.responseText, sending.getResponseHeader("Retry-After")));
    };
    sending.send(JSON.stringify(value));
  }).then(JSON.parse);
}

// ---- errors ----

const NO_DOCUMENTS = t("No documents yet: add some under “Documents”.");
const BUSY = t("The server is busy. Try again in a moment.");
const SAID = {
  no_store: NO_DOCUMENTS,
  no_documents: NO_DOCUMENTS,
  busy: BUSY,
  store_locked: BUSY,
  timeout: t("The answer took too long, and the server ended it."),
  ending: t("The server is being shut down."),
  no_space: t("The server has no space left for it."),
  nothing_found: t("No passage matches the question."),
  not_sent: t("A file of this name is there already, and no client has sent it: choose another name."),
  part_of_file: t("Its file holds further documents, which would be removed with it."),
};
const NUMBERS = /\d[\d,]*/g;
const KNOWN = [
  // what has no code of its own, with its numbers
  [
    /: it starts over$/,
    () => t("The conversation is longer than the model takes: the turns before this one were left out."),
  ],
  [
    /^the (prompt has|conversation would have) \d+ tokens\b.*, the model takes/,
    (tokens, most) =>
      t(
        "The prompt has {0} tokens, the model takes {1}: shorten the question, set fewer passages, or begin a new chat.",
        counted(tokens),
        counted(most),
      ),
  ],
  [
    /^the question has [\d,]+ characters, and what the model takes/,
    (letters, most) => t("The question has {0} characters, the model takes at most {1}: shorten it.", letters, most),
  ],
  [
    / was computed in place: /,
    () => t("A passage was missing in the store, or damaged there, and was computed for this answer."),
  ],
  [/^a shared store can only be asked$/, () => t("A shared store lists no documents.")],
  [/^document not found: /, () => t("It is not in the store any more.")],
  [/ is pinned, so nothing was removed$/, () => t("It is pinned: whoever runs the server can unpin it.")],
  [/^the request is too long$/, () => t("What was sent is longer than the server takes.")],
];

/** Say an error or a warning of the server: what happened, and its hint unless that is for a shell or a program. */
export function errorSaid({ message, hint, code }) {
  const end = ` (${hint})`;
  const what = hint && message.endsWith(end) ? message.slice(0, -end.length) : message;
  const known = KNOWN.find(([pattern]) => pattern.test(what));
  if (known) return known[1](...(what.match(NUMBERS) ?? []));
  if (SAID[code]) return SAID[code];
  return join([sentence(what), isForPeople(hint) && sentence(hint)]);
}

const isForPeople = (hint) => Boolean(hint) && !/`kvtool\b|\/v1\/|\boption `/.test(hint);

function failureOf(status, text, retry) {
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {} // of a proxy
  const said = error.message ? errorSaid(error) : t("The server answered with status {0}.", status);
  return Object.assign(new Failure(said, { status, code: error.code, retry: Number(retry) || 0 }), { error });
}

// ---- streams ----

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
      if (line.startsWith("data: ")) yield checked(JSON.parse(line.slice(6)));
    }
  }
}

function checked(event) {
  if (event.error) throw new Failure(errorSaid(event.error), { code: event.error.code });
  return event;
}

// ---- a server that is gone ----

/** Show that the server is gone, and look for it every few seconds. Returns the Failure. */
function gone() {
  $("gone").hidden = false;
  timer ||= setInterval(look, 3000);
  return new Failure(t("The server does not answer."), { code: "gone" });
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
