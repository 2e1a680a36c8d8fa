"use strict";

/**
 * An answer and its element. What a model writes goes to text nodes, or through `markdown`, which makes only elements
 * of its own: it is never markup.
 */
class Answer {
  /** `set`: the index of the sampling parameters that write it. `name`: its heading, if there are two. */
  constructor({ set, name, isMarkdown, text = "", reasoning = "", stats = "", error = "" }) {
    Object.assign(this, { set, name, isMarkdown, text, reasoning, error });
    this.element = document.getElementById("answer-template").content.firstElementChild.cloneNode(true);
    const find = (selector) => this.element.querySelector(selector);
    this.textElement = find(".answer-text");
    this.textElement.classList.toggle("text", !isMarkdown);
    this.reasoningNode = find(".reasoning .text").appendChild(new Text());
    this.stats = find(".stats");
    this.chooseButton = find(".choose");
    this.regenerateButton = find(".regenerate");
    find("h3").textContent = name;
    find("h3").hidden = !name;
    find(".copy").hidden = !navigator.clipboard;  // browsers have it on localhost and with TLS
    find(".copy").addEventListener("click", () => navigator.clipboard.writeText(this.text));
    this.blocks = [];
    this.isRunning = false;
    this.stats.textContent = stats;
    this.showText();
  }

  /** What a reload keeps. */
  get kept() {
    const { set, name, isMarkdown, text, reasoning, error } = this;
    const stats = [this.stats.textContent, ...(this.isRunning ? ["interrupted"] : [])].filter(Boolean).join(" · ");
    return { set, name, isMarkdown, text, reasoning, error, stats };
  }

  /** Write the answer from the pieces of `api.answer`. */
  async write(pieces) {
    this.startTime = performance.now();
    this.setRunning(true);
    try {
      for await (const piece of pieces) this.add(piece);
    } catch (error) {
      this.reason = error.name === "AbortError" ? "stopped" : "error";
      const isBroken = error instanceof TypeError;
      if (this.reason === "error") this.error = isBroken ? "The connection to the server broke." : error.message;
    }
    clearTimeout(this.timer);
    this.setRunning(false);
    this.show();
  }

  setRunning(isRunning) {
    this.isRunning = isRunning;
    this.element.classList.toggle("running", isRunning);
    this.element.setAttribute("aria-busy", String(isRunning));
  }

  add({ content, reasoning, reason, numTokens }) {
    this.reason = reason ?? this.reason;
    this.numTokens = numTokens ?? this.numTokens;
    if (!content && !reasoning) return;
    this.lastTime = performance.now();
    this.firstTime ??= this.lastTime;
    this.numChunks = (this.numChunks ?? 0) + 1;
    this.text += content;
    this.reasoning += reasoning;
    // Markdown is parsed from its start each time: what that took decides how long the next time waits.
    this.timer ??= setTimeout(() => this.show(), Math.max(16, 4 * (this.showTime ?? 0)));
  }

  /** Put what has arrived on the page, and follow its end if that was in view. */
  show() {
    this.timer = undefined;
    const log = document.getElementById("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    const start = performance.now();
    this.showText();
    this.showTime = performance.now() - start;
    this.showStats();
    if (follows) log.scrollTop = log.scrollHeight;
  }

  showText() {
    if (this.isMarkdown) this.blocks = markdown(this.textElement, this.text, this.blocks);
    else appendTo(this.textElement.firstChild ?? this.textElement.appendChild(new Text()), this.text);
    this.element.querySelector(".reasoning").hidden = !this.reasoning;
    appendTo(this.reasoningNode, this.reasoning);
    const error = this.element.querySelector(".error");
    error.hidden = !this.error;
    error.textContent = this.error;
  }

  showStats() {
    if (this.firstTime === undefined) {
      this.stats.textContent = this.reason ?? "";
      return;
    }
    const count = this.numTokens ?? this.numChunks;
    const about = this.numTokens === undefined ? "≈ " : "";
    const seconds = (this.lastTime - this.firstTime) / 1000;
    const parts = [`${about}${count.toLocaleString("en")} tokens`];
    if (count > 1 && seconds > 0) parts.push(`${about}${speed((count - 1) / seconds)} tokens/s`);
    parts.push(`first after ${Math.round(this.firstTime - this.startTime)} ms`);
    if (this.reason) parts.push(this.reason);
    this.stats.textContent = parts.join(" · ");
  }
}

/** Let a text node hold `text`, of which it holds the beginning: what a reader selected in it stays selected. */
function appendTo(node, text) {
  if (text.length > node.length) node.appendData(text.slice(node.length));
}

function speed(value) {
  return value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}
