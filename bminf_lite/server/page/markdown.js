"use strict";

/**
 * Markdown as elements, by the tokens of marked (marked.umd.js). All text becomes text nodes: no markup is ever parsed,
 * HTML that a model writes is shown as it stands, and images are links, because the page loads nothing.
 */
const markdown = (() => {
  const SAFE_LINK = /^(https?:|mailto:)/i;
  const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|(amp|lt|gt|quot|apos|nbsp));/gi;
  const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
  const HEADINGS = ["h3", "h4", "h5", "h6", "h6", "h6"];  // h1 is the page's, and h2 is left to it

  function element(name, children = [], properties = {}) {
    const made = document.createElement(name);
    made.append(...children);
    return Object.assign(made, properties);
  }

  /** A text with its entities as characters: those that a text with marks or numbers needs. */
  function decoded(text) {
    return text.replace(ENTITY, (entity, decimal, hex, name) => {
      if (name) return NAMED[name.toLowerCase()];
      const code = decimal ? parseInt(decimal, 10) : parseInt(hex, 16);
      return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
    });
  }

  function link(token, children) {
    if (!SAFE_LINK.test(token.href)) return children;
    return [element("a", children, { href: token.href, target: "_blank", rel: "noopener noreferrer nofollow" })];
  }

  function list(token) {
    const items = token.items.map((item) => {
      const box = item.task ? [element("input", [], { type: "checkbox", checked: item.checked, disabled: true }), " "] : [];
      const inner = item.tokens.filter(({ type }) => type !== "checkbox");
      return element("li", [...box, ...all(inner, !item.loose)]);
    });
    const ordered = token.ordered && token.start !== 1 ? { start: token.start } : {};
    return element(token.ordered ? "ol" : "ul", items, ordered);
  }

  function table(token) {
    const row = (cells, name) => element("tr", cells.map((cell, i) => {
      const made = element(name, all(cell.tokens));
      if (token.align[i]) made.style.textAlign = token.align[i];
      return made;
    }));
    const body = element("tbody", token.rows.map((cells) => row(cells, "td")));
    return element("div", [element("table", [element("thead", [row(token.header, "th")]), body])], { className: "table" });
  }

  function code(token) {
    const head = element("div", [element("span", [token.lang?.split(/\s/)[0] || "code"])], { className: "code-head" });
    if (navigator.clipboard) {  // browsers have it on localhost and with TLS
      const button = element("button", ["Copy"], { type: "button", className: "small" });
      button.addEventListener("click", () => navigator.clipboard.writeText(token.text));
      head.append(button);
    }
    const block = element("pre", [element("code", [token.text])], { tabIndex: 0 });
    return element("div", [head, block], { className: "code" });
  }

  /** The elements of a token. `tight`: paragraphs of a list without blank lines have no element of their own. */
  function one(token, tight) {
    const inner = () => token.tokens ? all(token.tokens) : [decoded(token.text ?? token.raw)];
    switch (token.type) {
      case "space":
      case "def":
        return [];
      case "paragraph":
        return tight ? inner() : [element("p", inner())];
      case "heading":
        return [element(HEADINGS[token.depth - 1], inner())];
      case "blockquote":
        return [element("blockquote", inner())];
      case "list":
        return [list(token)];
      case "table":
        return [table(token)];
      case "code":
        return [code(token)];
      case "hr":
        return [element("hr")];
      case "br":
        return [element("br")];
      case "strong":
        return [element("strong", inner())];
      case "em":
        return [element("em", inner())];
      case "del":
        return [element("del", inner())];
      case "codespan":
        return [element("code", [token.text])];
      case "link":
        return link(token, inner());
      case "image":
        return link(token, [`[image: ${decoded(token.text || token.href)}]`]);
      case "html":  // shown as it stands, but for the line breaks that models write in tables
        if (/^<br\s*\/?>$/i.test(token.raw)) return [element("br")];
        return [token.block ? element("p", [token.raw.trimEnd()], { className: "raw" }) : token.raw];
      case "escape":
        return [token.text];
      default:  // text, and what a later version adds
        return inner();
    }
  }

  function all(tokens, tight = false) {
    return tokens.flatMap((token) => one(token, tight));
  }

  /** The blocks of a text; the whole text as one where it cannot be parsed, because it nests too deeply for example. */
  function blocksOf(text) {
    try {
      return marked.lexer(text, { gfm: true, breaks: true }).map((token) => ({ raw: token.raw, token }));
    } catch {
      return [{ raw: text, token: null }];
    }
  }

  function elementsOf({ raw, token }) {
    try {
      if (token) return one(token).map((node) => typeof node === "string" ? new Text(node) : node);
    } catch { /* it nests too deeply */ }
    return [element("p", [raw], { className: "raw" })];
  }

  /**
   * Show a text in `parent`, and return its blocks. Given as `shown` next time, those that the longer text begins with
   * stay as they are, with what a reader selected or scrolled in them.
   */
  return (parent, text, shown) => {
    const blocks = blocksOf(text);
    let same = 0;
    while (same < shown.length && same < blocks.length && shown[same].raw === blocks[same].raw) same += 1;
    if (blocks.slice(same).some(({ token }) => token?.type === "def")) same = 0;  // earlier blocks may refer to it
    for (const { nodes } of shown.slice(same)) nodes.forEach((node) => node.remove());
    const added = blocks.slice(same).map((block) => ({ raw: block.raw, nodes: elementsOf(block) }));
    parent.append(...added.flatMap(({ nodes }) => nodes));
    return [...shown.slice(0, same), ...added];
  };
})();
