// The page: a conversation with the store's documents.

import { showFacts } from "./answer.js";
import { showDocuments, startDocuments } from "./documents.js";
import { $, Failure, events, foreign, h, look, request, sentence } from "./server.js";

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
  say("Searching and reading…");
  let answer = "";
  try {
    let about = null;
    for await (const event of events(await post(body, stop.signal))) {
      if (event.error) throw new Failure(sentence(event.error.message));
      const piece = event.choices[0]?.delta.content;
      if (piece) {
        if (!answer) say("Answering…");
        answer += piece;
        show(turn.text, answer);
      }
      about = event.kvtool ?? about;
      if (piece && body.kvtool.verify) say("Answering; full prefill checks it afterwards…");
    }
    answer = about.verified?.answer ?? answer;
    await current().catch(() => {}); // the answer is there in any case
    const again = (own, more) => post({ ...bodyOf(turns), kvtool: { ...withoutChecks(body.kvtool), ...own }, ...more });
    nearEnd(() => showFacts(turn.article, turn.number, answer, about, state.prefill, again));
    messages = [...turns, { role: "assistant", content: answer }];
    say("The answer is complete.");
  } catch (error) {
    fail(turn, question, error.name === "AbortError" ? "Stopped." : error.message, answer);
  } finally {
    turn.article.setAttribute("aria-busy", "false");
    running = null;
    busy(false);
  }
}

const withoutChecks = ({ cite, verify, explain, ...others }) => others;

/** Show why an answer is missing or incomplete, with a way to ask again. */
function fail(turn, question, why, answer) {
  const again = () => {
    turn.article.remove();
    turn.question.remove();
    void ask(question);
  };
  const retry = h("button", { type: "button", class: "small", onclick: again }, "Ask again");
  const incomplete = answer ? " The answer is incomplete, and not part of the conversation." : "";
  const note = h("p", { class: "note wrong" }, `${why}${incomplete} `, retry);
  turn.article.append(note);
  note.scrollIntoView({ block: "nearest" });
  say(why);
}

// ---- the conversation on the page ----

function addTurn(question) {
  number += 1;
  $("welcome").hidden = true;
  const text = h("p", { class: "text" });
  const article = h("article", { class: "answer", "aria-busy": "true", "aria-label": `Answer ${number}` }, text);
  const asked = h("p", foreign(question, { class: "question" }), question);
  $("turns").append(asked, article);
  $("turns").scrollTop = $("turns").scrollHeight;
  return { number, text, article, question: asked };
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

const say = (text) => void ($("said").textContent = text);

function busy(is) {
  $("ask-button").hidden = is;
  $("stop").hidden = !is;
  $("new").disabled = is;
}

function send() {
  const question = $("question").value.trim();
  if (!question || running) return;
  $("question").value = "";
  void ask(question);
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
  say("A new conversation.");
  $("question").focus();
}

// ---- start ----

async function current() {
  state = await (await request("page/state")).json();
}

async function load() {
  try {
    await current();
    $("model").textContent = state.model || "no model yet";
    const kept = $("fusion").value;
    const modes = state.fusions.map((name) => h("option", { value: name }, name));
    $("fusion").replaceChildren(h("option", { value: "" }, "the server’s"), ...modes);
    $("fusion").value = kept;
    await showDocuments(state);
    $("trouble").hidden = true;
  } catch (error) {
    $("trouble-said").textContent = error.message;
    $("trouble").hidden = error.code === "gone"; // which has a line of its own
  }
}

function start() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("question").addEventListener("keydown", typed);
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", restart);
  $("retry").addEventListener("click", () => void look());
  $("again").addEventListener("click", () => void load());
  document.addEventListener("server-back", () => void load());
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

start();
