// The list of the store's documents: search, upload, removal.

import { $, foreign, h, put, words } from "./elements.js";
import { Failure, errorSaid, request, upload, why } from "./server.js";
import { counted, join, plural, size, t } from "./text.js";

const MOST = 200; // rows that are shown at once
const WAIT = 5; // seconds before another try, while other documents are written
const WAITING = "kvtool-waiting"; // where the tab keeps the names of files that are not stored yet
let documents = [];
let state = {};
let isWanted = false; // the list of a store with many documents
let reload = null; // shows the server's state anew

/** Show the documents of the store. `found`: the server's state. */
export async function showDocuments(found) {
  state = found;
  $("uploads").hidden = !state.uploads;
  $("no-uploads").hidden = state.uploads;
  $("many").hidden = !state.many || isWanted;
  if (state.status === "empty") {
    documents = [];
    draw();
  } else if ($("many").hidden) await list();
  if (state.ingest) void follow(1);
}

async function list() {
  try {
    documents = (await (await request("v1/documents")).json()).data;
    documents.sort(byName);
    draw();
  } catch (error) {
    if (error.status !== 404) throw error;
    put($("count"), why(error)); // a shared store lists none
  }
}

/** List the documents of a store that has many, which takes seconds. */
async function listMany() {
  isWanted = true;
  $("many").hidden = true;
  put($("count"), t("Loading the list…"));
  await list().catch((error) => say(why(error), true));
}

const WORDS = [
  [t("token"), t("A short word or a part of one: models read and write texts in such pieces.")],
  [
    t("KV"),
    t(
      "The keys and values that the model computed for the document. They take much more space than the file, and save the time of computing them for each question.",
    ),
  ],
];

export function startDocuments(load) {
  reload = load;
  $("list").after(words(t("What do these numbers mean?"), WORDS));
  $("filter").addEventListener("input", draw);
  $("many").addEventListener("click", () => void listMany());
  $("files").addEventListener("change", () => void send([...$("files").files]));
  $("close-sent").addEventListener("click", closeSent);
  for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, dragged);
  const lost = takeWaiting();
  if (!lost.length) return;
  say(
    t(
      "The page was closed before these files were stored: {0}. Add again what is missing in the list.",
      lost.join(", "),
    ),
    true,
  );
  void follow(5);
}

/** Take files that are dropped anywhere: else the browser would leave the page and open them. */
function dragged(event) {
  if (!event.dataTransfer?.types.includes("Files")) return;
  const takes = state.uploads && !document.querySelector("dialog[open]");
  if (event.type !== "dragleave") event.preventDefault();
  if (event.type === "dragover") event.dataTransfer.dropEffect = takes ? "copy" : "none";
  document.body.classList.toggle("over", takes && event.type === "dragover");
  if (event.type === "drop" && takes) void send([...event.dataTransfer.files]);
}

// ---- the list ----

const nameOf = (source) => source.split("/").pop();
const composed = (text) => text.normalize("NFC").toLowerCase();
const byName = (a, b) => nameOf(a.source).localeCompare(nameOf(b.source)) || a.source.localeCompare(b.source);

function draw() {
  const words = composed($("filter").value).split(/\s+/).filter(Boolean);
  const found = documents.filter(({ source }) => words.every((word) => composed(source).includes(word)));
  put($("count"), countOf(found.length, documents.length));
  const folders = foldersOf(documents);
  const rows = found.slice(0, MOST).map((document) => row(document, folders.get(document.source)));
  if (found.length > MOST)
    rows.push(h("li", { class: "dim" }, t("{0} more: search for them.", counted(found.length - MOST))));
  $("list").replaceChildren(...rows);
}

function countOf(found, all) {
  if (!all) return t("No document yet.");
  if (found < all) return t("{0} of {1} documents", counted(found), counted(all));
  return plural(all, "{0} document", "{0} documents");
}

/** Return the end of the folder of each document that has its name in common with others: as much as tells them apart. */
function foldersOf(all) {
  const [groups, folders] = [new Map(), new Map()];
  for (const one of all) groups.set(nameOf(one.source), [...(groups.get(nameOf(one.source)) ?? []), one]);
  for (const same of groups.values()) {
    if (same.length < 2) continue;
    const parts = same.map(({ source }) => source.split("/").slice(0, -1));
    const deepest = Math.max(...parts.map((one) => one.length));
    const ends = (count) => parts.map((one) => one.slice(-count).join("/"));
    let count = 1;
    while (count < deepest && new Set(ends(count)).size < same.length) count++;
    same.forEach(({ source }, at) => folders.set(source, ends(count)[at]));
  }
  return folders;
}

function row(document, folder) {
  const name = nameOf(document.source);
  const facts = [
    plural(document.tokens, "{0} token", "{0} tokens"),
    t("{0} of KV", size(document.bytes)),
    document.pinned && t("pinned"),
    document.origin && t("from {0}", document.origin),
  ];
  const remove = h(
    "button",
    {
      type: "button",
      class: "small",
      "aria-label": t("Remove {0}", name),
      onclick: () => void confirmRemoval(document),
    },
    t("Remove"),
  );
  const whole = h("p", { class: "dim path" }, h("bdi", {}, document.source)); // a phone shows no title
  return h(
    "li",
    {},
    h(
      "div",
      { class: "facts-of" },
      h(
        "details",
        {},
        h("summary", { title: document.source }, h("bdi", foreign(name, { class: "name" }), name)),
        whole,
      ),
      folder && h("div", { class: "dim" }, t("in {0}", folder)),
      h("div", { class: "dim" }, join(facts, " · ")),
    ),
    remove,
  );
}

// ---- removal ----

async function confirmRemoval(document) {
  const name = nameOf(document.source);
  const dialog = $("confirm");
  $("confirm-name").textContent = name;
  $("confirm-path").textContent = document.source;
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => (dialog.onclose = resolve));
  if (dialog.returnValue !== "remove") return;
  try {
    say(t("Removing {0}…", name));
    const reply = await request(`v1/documents?${new URLSearchParams({ source: document.source, exact: true })}`, {
      method: "DELETE",
    });
    const { deleted } = await reply.json();
    documents = documents.filter(({ source }) => !deleted.includes(source));
    draw();
    say(t("{0} is removed.", name));
  } catch (error) {
    say(join([t("{0} is not removed.", name), why(error)]), true);
  }
  $("filter").focus(); // the button that had the focus may be gone
}

function say(text, wrong = false) {
  put($("documents-said"), text);
  $("documents-said").classList.toggle("wrong", wrong);
}

// ---- upload ----

const queue = []; // lines of files that wait
let now = null; // the line of the file that is sent
let [sent, stored] = [0, 0]; // files since nothing waited

/** Send files, one after the other. Those that come meanwhile are sent after them. */
async function send(files) {
  $("files").value = "";
  if (!files.length) return;
  const lines = files.map(lineOf);
  $("documents").open = true;
  $("sending").hidden = false;
  if (!now) $("sent").replaceChildren(); // what became of earlier files
  $("sent").append(...lines.map((line) => line.item));
  queue.push(...lines);
  noteWaiting([now, ...queue]);
  if (now) return;
  [sent, stored] = [0, 0];
  say("");
  addEventListener("beforeunload", warn);
  while ((now = queue.shift())) {
    $("sent").scrollTop = now.item.offsetTop - $("sent").offsetTop;
    const isStored = await sendOne(now);
    sent += 1;
    if (isStored) stored += 1;
    noteWaiting(queue);
    if (isStored || !queue.length) await reload();
  }
  removeEventListener("beforeunload", warn);
  say(
    sent === 1 ? t("{0} of 1 file stored.", stored) : t("{0} of {1} files stored.", counted(stored), counted(sent)),
    stored < sent,
  );
}

function lineOf(file) {
  const line = {
    file,
    bar: h("progress", { max: 1, value: 0, "aria-label": t("Progress of {0}", file.name) }),
    said: h("span", { class: "dim" }, t("waits")),
  };
  const name = h("bdi", foreign(file.name, { class: "name", title: file.name }), file.name);
  line.item = h("li", {}, name, " ", line.said, line.bar);
  return line;
}

/** Close the list of the files that were sent; files that wait stay in it. */
function closeSent() {
  const open = [...queue, now].filter(Boolean).map((line) => line.item);
  $("sent").replaceChildren(...[...$("sent").children].filter((item) => open.includes(item)));
  $("sending").hidden = !open.length;
  if (!open.length) say("");
  $("files").focus();
}

/** Send one file; return whether it is stored. The server answers once all of it is computed, so its state is asked. */
async function sendOne(line) {
  const end = (text, wrong) => {
    line.bar.remove();
    put(line.said, text);
    line.said.classList.toggle("wrong", wrong);
    return !wrong;
  };
  const { file } = line;
  if (file.size * 1.4 > state.max_body) return end(t("too large: at most {0}", size(state.max_body / 1.4)), true);
  let timer = 0;
  try {
    const document = { name: file.name.normalize("NFC"), data: await base64(file) };
    const report = await patiently(line, () => {
      timer ||= setInterval(() => void watch(line), 1000);
      return upload("v1/documents", { documents: [document] }, (share) => {
        line.bar.value = share / 2;
        put(line.said, share < 1 ? t("sending, {0} %", Math.round(share * 100)) : t("reading"));
      });
    });
    return end(...outcome(report));
  } catch (error) {
    return end(error.error ? refusal(error.error, file.name.normalize("NFC")) : why(error), true);
  } finally {
    clearInterval(timer);
  }
}

async function patiently(line, work) {
  for (let tries = 0; ; tries++) {
    try {
      return await work();
    } catch (error) {
      if (error.status === 401)
        await request("page/state"); // asks for the key
      else if (error.status !== 429 || tries === 20) throw error;
      else {
        put(line.said, t("waits for other documents"));
        await pause(error.retry || WAIT);
      }
    }
  }
}

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Failure(t("cannot be read: a folder is added by its files")));
    reader.readAsDataURL(file);
  });
}

// ---- what became of a file ----

/** Return what became of a file, and whether that is a failure. */
function outcome(report) {
  const { added, changed, unchanged } = report.documents;
  const failed = [...report.failures, ...report.known_failures][0];
  if (failed) return [reasonOf(failed.error), true];
  if (added && !report.tokens) return [t("added: the store had its text already"), false];
  if (added) return [t("added"), false];
  if (changed) return [t("replaced"), false];
  if (unchanged) return [t("unchanged"), false];
  return [t("not a document"), true];
}

const REASONS = [
  [/^empty\b/, t("empty")],
  [/^protected by a password/, t("protected by a password")],
  [/^protected by its seller/, t("protected by its seller")],
  [/^no text on its .* scanned/, t("only scanned pages, without text")],
  [/^no text on its/, t("no text on its pages")],
  [/^(damaged(: not? |, or not)|no mail)/, t("damaged, or not what its name says")],
  [/^an old Office file/, t("an old Office file: save it in the format that its name says")],
  [/^no line has a text/, t("no line has a text")],
  [/^takes over \S+ s\b/, t("takes too long to read")],
  [/^(damaged|broken)/, t("damaged")],
  [/^images? /, t("a picture: only text is read")],
  [/^archives? /, t("an archive: add the files in it")],
  [/^(binary\b|\.\S+ files are not read)/, t("not a document")],
  [/^(holds more than|larger than|parts within parts|takes over)|\bunpacks to\b/, t("too long")],
];

/** Say in a few words why a file is not read. Other reasons are told as the server has them. */
function reasonOf(error) {
  return REASONS.find(([pattern]) => pattern.test(error))?.[1] ?? error;
}

/** Say why the server has refused a file, without its own path and advice for a shell. */
function refusal(error, name) {
  if (error.code === "wrong_name") return t("a file cannot have this name here");
  const { message, hint } = error;
  const bare = (hint && message.endsWith(` (${hint})`) ? message.slice(0, -hint.length - 3) : message).normalize("NFC");
  const at = bare.indexOf(`${name}: `);
  return at < 0 ? errorSaid(error) : reasonOf(bare.slice(at + name.length + 2));
}

// ---- files that wait, and an ingest that runs ----

const warn = (event) => event.preventDefault(); // the browser asks whether to leave the page

/** Keep the names of the files that are not stored yet, for this page when it is opened again. */
function noteWaiting(lines) {
  const names = lines.filter(Boolean).map((line) => line.file.name);
  try {
    if (names.length) sessionStorage.setItem(WAITING, JSON.stringify(names));
    else sessionStorage.removeItem(WAITING);
  } catch {} // a browser that keeps nothing
}

function takeWaiting() {
  try {
    const names = JSON.parse(sessionStorage.getItem(WAITING) ?? "[]");
    sessionStorage.removeItem(WAITING);
    return names;
  } catch {
    return [];
  }
}

/** Return the progress of the ingest that the server runs; null if none. */
async function ingest() {
  return (await (await request("page/state")).json()).ingest;
}

const STEPS = { "reading files": t("reading files") };

/** Return how much of an ingest is done, from 0 to 1 or undefined, and what to say. */
function progressOf({ step, done = 0, total = 0, unit }) {
  if (unit !== "tokens") return [undefined, STEPS[step] ?? step];
  return [Math.min(1, done / Math.max(1, total)), t("computing: {0} of {1} tokens", counted(done), counted(total))];
}

async function watch(line) {
  const running = await ingest().catch(() => null);
  if (!running || !line.bar.isConnected) return;
  const [share, text] = progressOf(running);
  if (share !== undefined) line.bar.value = 0.5 + 0.5 * share;
  put(line.said, text);
}

let isFollowing = false;

/** Show an ingest that this page has not begun, until none runs for some seconds; then list its documents. */
async function follow(patience) {
  if (isFollowing || now) return;
  isFollowing = true;
  try {
    for (let quiet = 0; quiet < patience && !now;) {
      const running = await ingest();
      quiet = running ? 0 : quiet + 1;
      $("ingest").hidden = !running;
      if (running) showIngest(running);
      await pause(1);
    }
  } catch {
    return; // the page tells that the server is gone, or that it has no key
  } finally {
    $("ingest").hidden = true;
    isFollowing = false;
  }
  await reload();
}

function showIngest(running) {
  const [share, text] = progressOf(running);
  const bar = h("progress", { max: 1, value: share, "aria-label": t("The server is adding documents.") });
  put($("ingest"), t("The server is adding documents."), " ", text, bar);
}
