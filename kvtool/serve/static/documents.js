// The list of the store's documents: search, upload, removal.

import { $, Failure, counted, foreign, h, plural, request, size, upload } from "./server.js";

const MOST = 200; // rows that are shown at once
const WAIT = 5; // seconds before another try, while other documents are written
let documents = [];
let state = {};
let busy = false;
let isWanted = false; // the list of a store with many documents
let reload = null; // shows the server's state anew

/** Show the documents of the store. `found`: the server's state. */
export async function showDocuments(found) {
  state = found;
  $("uploads").hidden = !state.uploads;
  $("no-uploads").hidden = state.uploads;
  $("many").hidden = !state.many || isWanted;
  if (state.status === "empty") draw();
  else if ($("many").hidden) await list();
}

async function list() {
  try {
    documents = (await (await request("v1/documents")).json()).data;
    documents.sort((a, b) => a.source.localeCompare(b.source));
    draw();
  } catch (error) {
    if (error.status !== 404) throw error;
    $("count").textContent = error.message; // a shared store lists none
  }
}

/** List the documents of a store that has many, which takes seconds. */
async function listMany() {
  isWanted = true;
  $("many").hidden = true;
  $("count").textContent = "Loading the list…";
  await list().catch((error) => say(error.message, true));
}

export function startDocuments(load) {
  reload = load;
  $("filter").addEventListener("input", draw);
  $("many").addEventListener("click", () => void listMany());
  $("files").addEventListener("change", () => void send([...$("files").files]));
  const drop = $("uploads");
  for (const kind of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop") void send([...event.dataTransfer.files]);
    });
  }
}

const nameOf = (source) => source.split("/").pop();
const composed = (text) => text.normalize("NFC").toLowerCase();

function draw() {
  const words = composed($("filter").value).split(/\s+/).filter(Boolean);
  const found = documents.filter(({ source }) => words.every((word) => composed(source).includes(word)));
  const of = found.length === documents.length ? "" : ` of ${counted(documents.length)}`;
  $("count").textContent = documents.length
    ? `${counted(found.length)}${of} ${documents.length === 1 ? "document" : "documents"}`
    : "No document yet.";
  const rows = found.slice(0, MOST).map(row);
  if (found.length > MOST)
    rows.push(h("li", { class: "dim" }, `${counted(found.length - MOST)} more: search for them.`));
  $("list").replaceChildren(...rows);
}

function row(document) {
  const name = nameOf(document.source);
  const facts = [
    plural(document.tokens, "token"),
    size(document.bytes),
    document.pinned && "pinned",
    document.origin && `from ${document.origin}`,
  ];
  const remove = h(
    "button",
    { type: "button", class: "small", "aria-label": `Remove ${name}`, onclick: () => void confirmRemoval(document) },
    "Remove",
  );
  return h(
    "li",
    {},
    h(
      "div",
      {},
      h("bdi", foreign(name, { class: "name", title: document.source }), name),
      h("div", { class: "dim" }, facts.filter(Boolean).join(" · ")),
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
    say(`Removing ${name}…`);
    const reply = await request(`v1/documents?${new URLSearchParams({ source: document.source })}`, {
      method: "DELETE",
    });
    const { forgotten } = await reply.json();
    documents = documents.filter(({ source }) => !forgotten.includes(source));
    draw();
    say(`${name} is removed.`);
  } catch (error) {
    say(`${name} is not removed. ${error.message}`, true);
  }
  $("filter").focus(); // the button that had the focus may be gone
}

function say(text, wrong = false) {
  $("documents-said").textContent = text;
  $("documents-said").classList.toggle("wrong", wrong);
}

// ---- upload ----

async function send(files) {
  $("files").value = "";
  if (busy || !files.length) return;
  busy = $("files").disabled = true;
  const lines = files.map((file) => {
    const line = {
      file,
      bar: h("progress", { max: 1, value: 0, "aria-label": `Progress of ${file.name}` }),
      said: h("span", { class: "dim" }, "waits"),
    };
    line.item = h("li", {}, h("bdi", foreign(file.name, { class: "name" }), file.name), line.bar, line.said);
    return line;
  });
  $("sent").replaceChildren(...lines.map((line) => line.item));
  let sent = 0;
  try {
    for (const line of lines) sent += await sendOne(line);
    await reload();
    say(`${counted(sent)} of ${plural(files.length, "file")} stored.`, sent < files.length);
  } catch (error) {
    say(error.message, true);
  } finally {
    busy = $("files").disabled = false;
  }
}

/** Send one file; return 1 if it is stored. The server answers once all of it is computed, so its state is asked. */
async function sendOne(line) {
  const end = (text, wrong) => {
    line.bar.remove();
    line.said.textContent = text;
    line.said.classList.toggle("wrong", wrong);
    return wrong ? 0 : 1;
  };
  const { file } = line;
  if (file.size * 1.4 > state.max_body) return end(`too large: at most ${size(state.max_body / 1.4)}`, true);
  let timer = 0;
  try {
    const document = { name: file.name.normalize("NFC"), data: await base64(file) };
    const report = await patiently(line, () => {
      timer ||= setInterval(() => void watch(line), 1000);
      return upload("v1/documents", { documents: [document] }, (share) => {
        line.bar.value = share / 2;
        line.said.textContent = share < 1 ? `sending, ${Math.round(share * 100)} %` : "reading";
      });
    });
    return end(...outcome(report));
  } catch (error) {
    return end(error.message, true);
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
        line.said.textContent = "waits for other documents";
        await new Promise((resolve) => setTimeout(resolve, 1000 * (error.retry || WAIT)));
      }
    }
  }
}

async function watch(line) {
  const now = await request("page/state")
    .then((reply) => reply.json())
    .catch(() => ({}));
  if (!now.ingest || !line.bar.isConnected) return;
  const { step, done = 0, total = 0, unit } = now.ingest;
  if (unit === "tokens") line.bar.value = 0.5 + 0.5 * Math.min(1, done / Math.max(1, total));
  line.said.textContent = unit === "tokens" ? `${step}: ${counted(done)} of ${counted(total)} ${unit}` : `${step}…`;
}

/** Return what became of a file, and whether that is a failure. */
function outcome(report) {
  const { added, changed, unchanged } = report.documents;
  const failed = [...report.failures, ...report.still_failing][0];
  if (failed) return [failed.error, true];
  if (added) return [`added, ${plural(report.tokens, "token")}`, false];
  if (changed) return [`replaced, ${plural(report.tokens, "token")}`, false];
  if (unchanged) return ["unchanged", false];
  return ["not stored: no reader knows this kind of file", true];
}

function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Failure(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}
