// The page: a conversation with the store's documents.

import { showFacts } from "./answer.js";
import { showDocuments, startDocuments } from "./documents.js";
import { $, foreign, h, put, tell, tellAgain, tellHtml, words } from "./elements.js";
import { events, look, request, takeKey, why } from "./server.js";
import { firstLanguage, join, keepLanguage, otherLanguage, t, useLanguage } from "./text.js";

let messages = []; // of the conversation, as the API has them
let state = {};
let running = null; // what stops the answer that is written
let number = 0; // of answers on this page

// ---- asking ----

/** Return the body of a question. Everything that is not set is left to the server. */
function bodyOf(turns, own = {}, more = {}) {
  const kvtool = { explain: true, cite: $("cite").checked, verify: $("verify").checked, ...own };
  if ($("fusion").value) kvtool.fusion ??= $("fusion").value;
  if ($("top-k").value) kvtool.top_k = Number($("top-k").value);
  const body = { model: "kvtool", stream: true, messages: turns, kvtool, ...more };
  if ($("max-tokens").value) body.max_tokens ??= Number($("max-tokens").value);
  return body;
}

function post(body, signal) {
  const headers = { "Content-Type": "application/json" };
  return request("v1/chat/completions", { method: "POST", headers, signal, body: JSON.stringify(body) });
}

async function ask(question) {
  const turns = [...messages, { role: "user", content: question }];
  const body = bodyOf(turns);
  const stop = (running = new AbortController());
  const turn = addTurn(question);
  busy(true);
  say(t("Searching and reading…"));
  let answer = "";
  try {
    let about = null;
    for await (const event of events(await post(body, stop.signal))) {
      const piece = event.choices[0]?.delta.content;
      if (piece) {
        if (!answer) say(body.kvtool.verify ? t("Answering; full prefill checks it afterwards…") : t("Answering…"));
        answer += piece;
        draw(turn, answer);
      }
      about = event.kvtool ?? about;
    }
    cancelAnimationFrame(turn.frame);
    answer = about.verified?.answer ?? answer;
    await current().catch(() => {}); // the answer is there in any case
    const again = (own, more) => post({ ...bodyOf(turns), kvtool: { ...withoutChecks(body.kvtool), ...own }, ...more });
    nearEnd(() => showFacts(turn.article, turn.number, answer, about, again));
    messages = [...turns, { role: "assistant", content: answer }];
    if (!body.kvtool.fusion) put($("fusion-server"), t("the server’s ({0})", about.fusion));
    say(t("The answer is complete."));
  } catch (error) {
    cancelAnimationFrame(turn.frame);
    show(turn.text, answer);
    fail(turn, question, error.name === "AbortError" ? t("Stopped.") : why(error), answer);
  } finally {
    turn.article.setAttribute("aria-busy", "false");
    running = null;
    busy(false);
  }
}

const withoutChecks = ({ cite, verify, explain, ...others }) => others;

/** Show why an answer is missing or incomplete, with a way to ask again. */
function fail(turn, question, reason, answer) {
  const again = () => {
    if (running) return say(t("Wait for the end of the answer, or stop it."));
    turn.article.remove();
    turn.question.remove();
    void ask(question);
  };
  const retry = h("button", { type: "button", class: "small", onclick: again }, t("Ask again"));
  const incomplete = answer && t("The answer is incomplete, and not part of the conversation.");
  const note = h("p", { class: "note wrong" }, join([reason, incomplete]), " ", retry);
  turn.article.append(note);
  note.scrollIntoView({ block: "nearest" });
  say(answer ? t("The answer is incomplete.") : t("There is no answer."));
}

// ---- the conversation on the page ----

function addTurn(question) {
  number += 1;
  $("welcome").hidden = true;
  const text = h("p", { class: "text" });
  const label = t("Answer {0}", number);
  const article = h("article", { class: "answer", "aria-busy": "true", "aria-label": label }, text);
  const asked = h("p", foreign(question, { class: "question" }), question);
  $("turns").append(asked, article);
  $("turns").scrollTop = $("turns").scrollHeight;
  return { number, text, article, question: asked, frame: 0 };
}

/** Show what there is of an answer with the next frame: a fast one has several pieces until then. */
function draw(turn, answer) {
  cancelAnimationFrame(turn.frame);
  turn.frame = requestAnimationFrame(() => show(turn.text, answer));
}

function show(element, answer) {
  nearEnd(() => {
    element.textContent = answer;
    for (const [name, value] of Object.entries(foreign(answer))) element.setAttribute(name, value);
  });
}

/** Change the page, and stay at its end if the reader is there. */
function nearEnd(change) {
  const main = $("turns");
  const isThere = main.scrollHeight - main.scrollTop - main.clientHeight < 60;
  change();
  if (isThere) main.scrollTop = main.scrollHeight;
}

const say = (text) => void put($("said"), text);

/** Show the one of both buttons that can be pressed now. It gets the focus if the other one had it. */
function busy(is) {
  const [shown, other] = is ? [$("stop"), $("ask-button")] : [$("ask-button"), $("stop")];
  const hadFocus = document.activeElement === other;
  shown.hidden = false;
  other.hidden = true;
  if (hadFocus) shown.focus();
  $("new").disabled = is;
}

function send() {
  if (running) return say(t("Wait for the end of the answer, or stop it."));
  if (!areOptionsRight()) return;
  const question = $("question").value.trim();
  if (!question) {
    $("question").focus();
    return say(t("Type a question first."));
  }
  $("question").value = "";
  if ($("options").open && isSmall.matches) $("options").open = false; // the answer needs the room
  void ask(question);
}

const isSmall = matchMedia("(max-width: 40rem), (max-height: 40rem)");

/** Check the numbers of the options, and show which one is wrong. */
function areOptionsRight() {
  const fields = [$("top-k"), $("max-tokens")];
  const wrong = fields.find((field) => !field.validity.valid);
  for (const field of fields) field.setAttribute("aria-invalid", String(field === wrong));
  const message = wrong && t("Give a whole number from {0} to {1}, or nothing.", wrong.min, wrong.max);
  put($("options-wrong"), message);
  if (!wrong) return true;
  $("options").open = true;
  wrong.focus();
  return false;
}

/** Enter sends, Shift and Enter begin a line; the Enter that ends a composition (Korean, Japanese, …) does neither. */
function typed(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  send();
}

function restart() {
  messages = [];
  $("turns").replaceChildren();
  $("welcome").hidden = false;
  say(t("A new conversation."));
  $("question").focus();
}

// ---- the language ----

function speak(name) {
  useLanguage(name);
  tellAgain();
  const [other, own] = otherLanguage();
  tell($("language"), "lang", other);
  put($("language"), own);
}

function switchLanguage() {
  const [other] = otherLanguage();
  keepLanguage(other);
  speak(other);
}

// ---- start ----

async function current() {
  state = await (await request("page/state")).json();
}

async function load() {
  $("trouble").hidden = true;
  try {
    await current();
    put($("model"), state.model || t("no model yet"));
    const kept = $("fusion").value;
    const modes = state.fusions.map((name) => h("option", { value: name }, name));
    $("fusion").replaceChildren($("fusion-server"), ...modes);
    $("fusion").value = kept;
    await showDocuments(state);
  } catch (error) {
    put($("trouble-said"), why(error));
    $("trouble").hidden = error.code === "gone"; // which has a line of its own
  }
}

const OPTIONS = [
  [
    t("Cite the sources"),
    t("Adds a number to each sentence. It leads to the sentence of a passage that is most like it."),
  ],
  [
    t("Check each answer by full prefill"),
    t("Afterwards the model reads everything again without shortcuts, and corrects the answer where it differs."),
  ],
  [
    t("Fusion mode"),
    t(
      "Which part of the stored passages is computed again for an answer: full all of it, reuse nothing, the others something between. More takes longer, and is nearer to what the model says without a store.",
    ),
  ],
  [t("Most passages"), t("How many pieces of the documents, about 256 tokens each, the model reads for an answer.")],
  [t("Longest answer, in tokens"), t("A token is a short word or a part of one. A longer answer is cut off.")],
  [t("the server’s"), t("What whoever runs the server has set.")],
];

function start() {
  tellHtml();
  $("options").append(words(t("What do these words mean?"), OPTIONS));
  speak(firstLanguage());
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("question").addEventListener("keydown", typed);
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", restart);
  $("language").addEventListener("click", switchLanguage);
  $("retry").addEventListener("click", () => void look());
  $("again").addEventListener("click", () => void load());
  document.addEventListener("unlocked", () => void load());
  document.addEventListener("server-back", () => {
    say(t("The server answers again."));
    void load();
  });
  addEventListener("hashchange", () => takeKey() && void load());
  for (const button of document.querySelectorAll("dialog button[value='']")) {
    button.addEventListener("click", () => button.closest("dialog").close(""));
  }
  for (const form of document.querySelectorAll("dialog form")) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.closest("dialog").close(event.submitter?.value ?? "use");
    });
  }
  const wide = matchMedia("(min-width: 60rem)");
  const place = () => ($("documents").open = wide.matches);
  wide.addEventListener("change", place);
  place();
  startDocuments(load);
  void load();
}

takeKey();
start();
