"use strict";
// Keeps the conversation and shows what comes, piece by piece. Text only ever goes in as text.
let turns = [], facts = null, running = null;

const byId = (id) => document.getElementById(id);
const make = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};
const state = (text, className) => {
  byId("state").textContent = text;
  byId("state").className = className;
};
const toEnd = () => window.scrollTo(0, document.body.scrollHeight);

const card = (who, title) => {
  const box = make("article", undefined, `answer busy ${who}`), text = make("pre", "");
  box.append(make("h3", title), text);
  return { box, text };
};

const lines = async function* (body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n");
    held = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
};

const fail = (text) => {
  byId("talk").append(make("p", text, "error"));
  toEnd();
};

const busy = (is) => {
  byId("send").disabled = byId("reset").disabled = is;
  byId("stop").hidden = !is;
  state(is ? "answering" : "ready", "live");
};

const ask = async (question) => {
  const compares = Boolean(facts.adapter) && byId("compares").checked;
  const asked = [...turns, { role: "user", content: question }];
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...asked] : asked;
  const said = make("div", undefined, "said question");
  said.append(make("pre", question));
  const answers = make("div", undefined, "answers"), cards = {};
  cards.adapter = card("adapter", facts.adapter || facts.model);
  if (compares) cards.base = card("base", `${facts.model}, the base`);
  for (const one of Object.values(cards)) answers.append(one.box);
  byId("talk").append(said, answers);
  running = new AbortController();
  busy(true);
  toEnd();
  let answer = "", isRefused = false, isStopped = false;
  try {
    const found = await fetch("ask", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ messages, compares }),
      signal: running.signal,
    });
    if (!found.ok) throw new Error(await found.text());
    for await (const piece of lines(found.body)) {
      if (piece.error !== undefined) {
        isRefused = true;
        fail(piece.error);
        continue;
      }
      const { box, text } = cards[piece.of];
      if (piece.text !== undefined) {
        text.textContent += piece.text;
        if (piece.of === "adapter") answer += piece.text;
        toEnd();
      } else {
        box.classList.remove("busy");
        if (piece.end) box.append(make("p", piece.end));
      }
    }
  } catch (error) {
    isStopped = error.name === "AbortError";
    if (!isStopped) {
      isRefused = true;
      fail(error instanceof TypeError ? "the command has ended, or its page" : error.message);
    }
  }
  for (const { box } of Object.values(cards)) {
    if (!box.classList.contains("busy")) continue;
    box.classList.remove("busy");
    if (!isRefused) box.append(make("p", "(stopped)"));
  }
  if (isRefused) answers.remove();
  else if (answer || !isStopped) turns = [...asked, { role: "assistant", content: answer }];
  running = null;
  busy(false);
  byId("question").focus();
};

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = byId("question").value;
  if (running || !facts || !question.trim()) return;
  byId("question").value = "";
  ask(question);
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
byId("stop").addEventListener("click", () => { if (running) running.abort(); });
const reset = () => {
  turns = [];
  byId("talk").replaceChildren();
};
byId("reset").addEventListener("click", reset);
byId("system").addEventListener("change", reset);

const begin = async () => {
  try {
    facts = await (await fetch("facts.json", { cache: "no-store" })).json();
  } catch {
    state("the command has ended, or its page", "lost");
    return;
  }
  byId("name").textContent = facts.adapter || facts.model;
  document.title = `${facts.adapter || facts.model}: meshlora`;
  byId("facts").textContent = [facts.adapter && `on ${facts.model}`, facts.topology && `on ${facts.topology}`,
    facts.positions && `${facts.positions.toLocaleString("en")} positions`].filter(Boolean).join(", ");
  byId("system").value = facts.system;
  byId("comparing").hidden = !facts.adapter;
  byId("compares").checked = Boolean(facts.adapter);
  state("ready", "live");
  byId("question").focus();
};
begin();
