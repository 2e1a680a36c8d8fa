"use strict";

const byId = (id) => document.getElementById(id);
const [model, key, mode, system, compare, prompt, log] =
  ["model", "key", "mode", "system", "compare", "prompt", "log"].map(byId);

/** The models of the server by name; null until it has listed them. */
let models = null;
/** The conversation: what was asked, in which mode, the answers (one, or two side by side), and which of them goes on. */
let turns = [];
/** What stops the answers that are being written; null while none is. */
let running = null;
/** Whether the message that is typed goes when these answers end. */
let isWaiting = false;
/** The turn whose message is edited: sending replaces it and those after it. Null while none is. */
let edited = null;
let lastMessage = "";

// -- settings --------------------------------------------------------------------------------------------------------

const sets = ["A", "B"].map((name) => {
  const element = byId("set-template").content.firstElementChild.cloneNode(true);
  byId("sets").append(element);
  return { name, inputs: [...element.querySelectorAll("input")], element };
});

/** The sampling parameters of a set that are filled in. */
function sampling({ inputs }) {
  return Object.fromEntries(inputs.filter(({ value }) => value !== "").map(({ name, value }) => [name, Number(value)]));
}

/** Whether the parameters can be sent; the first that cannot is shown. */
function areValid() {
  const shown = sets.filter(({ element }) => !element.hidden).flatMap(({ inputs }) => inputs);
  const invalid = shown.find((input) => !input.checkValidity());
  if (invalid) {
    openSettings(true);
    invalid.reportValidity();
  }
  return !invalid;
}

function showSettings() {
  const two = compare.checked;
  sets[1].element.hidden = !two;
  sets.forEach(({ name, element }) => {
    element.querySelector("legend").textContent = two ? `Sampling of ${name}` : "Sampling";
  });
  byId("system-label").hidden = mode.value !== "chat";
  prompt.placeholder = mode.value === "chat" ? "Message" : "Text to continue";
  prompt.setAttribute("aria-label", prompt.placeholder);
  byId("empty").textContent = mode.value === "chat" ? "Ask something below." : "Write the beginning of a text below.";
}

/** Show what the chosen model can do, and its defaults. */
function showModel() {
  const { capabilities, default_sampling_params: defaults } = models?.[model.value] ?? {};
  const hasChat = capabilities?.chat ?? true;
  mode.querySelector("[value=chat]").disabled = !hasChat;
  byId("no-chat").hidden = hasChat;
  if (!hasChat) mode.value = "completion";
  for (const input of sets.flatMap(({ inputs }) => inputs)) {
    const value = defaults?.[input.name];
    if (input.name === "max_tokens" && defaults) input.placeholder = value ?? "no limit";
    else if (value !== undefined) input.placeholder = value;
  }
  showSettings();
}

async function loadModels() {
  const state = byId("state");
  try {
    models = Object.fromEntries((await api.models(key.value.trim())).map((entry) => [entry.id, entry]));
    const chosen = model.value || kept.model;
    model.replaceChildren(...Object.keys(models).map((id) => new Option(id, id, false, id === chosen)));
    state.textContent = "";
  } catch (error) {
    state.textContent = error instanceof TypeError ? "The server does not answer." : error.message;
  }
  showModel();
}

function openSettings(open) {
  document.body.classList.toggle("settings-closed", !open);
  byId("toggle").setAttribute("aria-expanded", String(open));
}

const isWide = () => matchMedia("(min-width: 50.01rem)").matches;

// -- what a reload keeps ---------------------------------------------------------------------------------------------

const STORED = "conversation";
let kept = {};
/** Set before Chromium breaks the connections of a page that it leaves: that they broke is not kept. */
let isLeaving = false;

/** Keep the conversation and the settings for this tab; the key is not among them. */
function keep() {
  if (isLeaving) return;
  kept = {
    turns: turns.map(({ question, mode, chosen, answers }) =>
      ({ question, mode, chosen, answers: answers.map((answer) => answer.kept) })),
    typed: prompt.value, model: model.value, mode: mode.value, system: system.value, compare: compare.checked,
    theme: document.documentElement.dataset.theme, sets: sets.map(sampling),
  };
  try {
    sessionStorage.setItem(STORED, JSON.stringify(kept));
  } catch {
    byId("state").textContent = "The browser's storage is full: a reload loses this conversation.";
  }
}

/** Bring back what was kept. A page of another version may have written it: what cannot be read is left out. */
function restore() {
  try {
    kept = JSON.parse(sessionStorage.getItem(STORED)) ?? {};
    if (kept.theme) document.documentElement.dataset.theme = kept.theme;
    mode.value = kept.mode ?? "chat";
    system.value = kept.system ?? "";
    compare.checked = kept.compare ?? false;
    prompt.value = kept.typed ?? "";
    sets.forEach(({ inputs }, i) => inputs.forEach((input) => { input.value = kept.sets?.[i]?.[input.name] ?? ""; }));
    for (const { question, mode, chosen, answers } of kept.turns ?? []) {
      addTurn(question, mode, answers.map((answer) => new Answer(answer)), chosen);
    }
    log.scrollTop = log.scrollHeight;
  } catch {
    sessionStorage.removeItem(STORED);
  }
}

/** Save a text as a file. */
function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

function fileName(ending) {
  return `conversation-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.${ending}`;
}

function asMarkdown() {
  const part = (title, text) => `## ${title}\n\n${text.trim()}\n`;
  return [
    `# Conversation with ${model.value || "a model"}\n`,
    ...(system.value.trim() ? [part("System", system.value)] : []),
    ...turns.flatMap(({ question, mode, answers }) => [
      part(mode === "chat" ? "User" : "Text", question),
      ...answers.map(({ name, text }) => part(`${mode === "chat" ? "Assistant" : "Continuation"} ${name}`.trim(), text)),
    ]),
  ].join("\n");
}

function asJson() {
  const written = turns.map(({ question, mode, chosen, answers }) =>
    ({ mode, question, chosen, answers: answers.map(({ text, reasoning }) => ({ text, reasoning })) }));
  return JSON.stringify({ model: model.value, system: system.value, turns: written }, null, 2);
}

// -- the conversation ------------------------------------------------------------------------------------------------

function messages(turn) {
  const past = turns.slice(0, turns.indexOf(turn)).filter((t) => t.mode === "chat" && t.answers[t.chosen].text);
  return [
    ...(system.value.trim() ? [{ role: "system", content: system.value }] : []),
    ...past.flatMap((t) => [
      { role: "user", content: t.question },
      { role: "assistant", content: t.answers[t.chosen].text },
    ]),
    { role: "user", content: turn.question },
  ];
}

function newAnswer(set, name, turnMode) {
  return new Answer({ set, name, isMarkdown: turnMode === "chat" });
}

/** Put a turn at the end of the conversation. */
function addTurn(question, turnMode, answers, chosen = 0) {
  const element = byId("turn-template").content.firstElementChild.cloneNode(true);
  element.querySelector(".question .text").textContent = question;
  element.querySelector(".answers").classList.toggle("two", answers.length > 1);
  element.querySelector(".answers").append(...answers.map((answer) => answer.element));
  const turn = { question, mode: turnMode, answers, element };
  element.querySelector(".edit").addEventListener("click", () => edit(turn));
  answers.forEach((answer, i) => connect(turn, answer, i));
  turns.push(turn);
  byId("turns").append(element);
  byId("empty").hidden = true;
  lastMessage = question;
  choose(turn, Math.min(chosen, answers.length - 1));
  return turn;
}

function connect(turn, answer, index) {
  answer.chooseButton.hidden = turn.answers.length < 2;
  answer.chooseButton.addEventListener("click", () => choose(turn, index));
  answer.regenerateButton.addEventListener("click", () => regenerate(turn, index));
}

function choose(turn, index) {
  turn.chosen = index;
  turn.answers.forEach((answer, i) => {
    answer.element.classList.toggle("chosen", i === index);
    answer.chooseButton.setAttribute("aria-pressed", String(i === index));
  });
}

function dropFrom(turn) {
  for (const { element } of turns.splice(turns.indexOf(turn))) element.remove();
}

function setRunning(controller) {
  running = controller;
  document.body.classList.toggle("is-running", running !== null);
  byId("stop").hidden = running === null;
}

/** Let the server write answers of a turn. */
async function write(turn, answers) {
  const isChat = turn.mode === "chat";
  const asked = isChat ? { messages: messages(turn) } : { prompt: turn.question };
  const controller = new AbortController();
  setRunning(controller);
  await Promise.all(answers.map((answer) => {
    const body = { ...(model.value && { model: model.value }), ...sampling(sets[answer.set]), ...asked };
    return answer.write(api.answer(isChat, body, key.value.trim(), controller.signal));
  }));
  if (running !== controller) return;  // a new conversation has begun
  setRunning(null);
  keep();
  byId("announcement").textContent =
    answers.map((answer) => `Answer ${answer.name} ended: ${answer.stats.textContent}`).join(". ");
  const goesOn = isWaiting && answers.every(({ error }) => !error);
  isWaiting = false;
  showNote();
  if (goesOn) send();
}

/** Send the typed message; during an answer, when that ends. */
async function send() {
  if (!prompt.value.trim() || !areValid()) return;
  if (running) {
    isWaiting = true;
    showNote();
    return;
  }
  await listed;  // the model may have no chat template
  const question = prompt.value;
  if (running || !question.trim()) return;
  if (edited) dropFrom(edited);
  edited = null;
  prompt.value = "";
  const names = compare.checked ? ["A", "B"] : [""];
  const turn = addTurn(question, mode.value, names.map((name, i) => newAnswer(i, name, mode.value)));
  showNote();
  if (!isWide()) openSettings(false);
  log.scrollTop = log.scrollHeight;
  keep();
  await write(turn, turn.answers);
}

async function regenerate(turn, index) {
  if (running || !areValid()) return;
  const { set, name, element } = turn.answers[index];
  const answer = newAnswer(set, name, turn.mode);
  turn.answers[index] = answer;
  element.replaceWith(answer.element);
  connect(turn, answer, index);
  choose(turn, turn.chosen);
  await write(turn, [answer]);
}

/** Let a message be typed in another way. */
function edit(turn) {
  if (running) return;
  edited = turn;
  prompt.value = turn.question;
  mode.value = turn.mode;
  showModel();
  showNote();
  prompt.focus();
}

/** Say what the typed message will do, where that is not the plain thing. */
function showNote() {
  const note = byId("note");
  note.hidden = !isWaiting && !edited;
  note.querySelector("span").textContent = isWaiting
    ? "The message goes when this answer ends." : "Sending replaces this message and what follows it.";
  turns.forEach(({ element }, i) => element.classList.toggle("replaced", !!edited && i >= turns.indexOf(edited)));
}

/** Let the message that waits stay, or the conversation as it is. */
function cancel() {
  if (edited) prompt.value = "";
  isWaiting = false;
  edited = null;
  showNote();
  prompt.focus();
}

function newChat() {
  running?.abort();
  setRunning(null);
  isWaiting = false;
  edited = null;
  showNote();
  turns = [];
  byId("turns").replaceChildren();
  byId("empty").hidden = false;
  keep();
  prompt.focus();
}

// -- events ----------------------------------------------------------------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !prompt.value) {
    event.preventDefault();
    prompt.value = lastMessage;
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (edited) cancel();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("cancel").addEventListener("click", cancel);
byId("new").addEventListener("click", newChat);
byId("export-markdown").addEventListener("click", () => download(fileName("md"), "text/markdown", asMarkdown()));
byId("export-json").addEventListener("click", () => download(fileName("json"), "application/json", asJson()));
byId("toggle").addEventListener("click", () => openSettings(document.body.classList.contains("settings-closed")));
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
compare.addEventListener("change", showSettings);
mode.addEventListener("change", showSettings);
model.addEventListener("change", showModel);
key.addEventListener("change", loadModels);
addEventListener("beforeunload", () => {
  keep();
  isLeaving = true;
});
addEventListener("pageshow", () => { isLeaving = false; });
addEventListener("pagehide", keep);
document.addEventListener("visibilitychange", () => {  // a phone may end a page in the background without another event
  if (document.visibilityState === "hidden") keep();
});

restore();
openSettings(isWide());
showSettings();
const listed = loadModels();
