"use strict";

/** The requests of the page: which models there are, and an answer as it is written. */
const api = (() => {
  function headers(key) {
    return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  }

  /** A failed response as an error whose message is the server's. */
  async function failure(response) {
    const text = await response.text();
    let message = text.slice(0, 500) || response.statusText;
    try {
      message = JSON.parse(text).error.message;
    } catch { /* not the server's own error: the text itself is shown */ }
    const retry = response.headers.get("Retry-After");
    if (response.status === 401) message += "\nEnter the API key in the settings.";
    if (/no chat template/.test(message)) message += '\nThe mode "Continue a text" in the settings needs none.';
    if (retry) message += `\nTry again in ${retry} s.`;
    return new Error(`${response.status}: ${message}`);
  }

  async function send(path, key, options) {
    const response = await fetch(path, { headers: headers(key), ...options });
    if (!response.ok) throw await failure(response);
    return response;
  }

  /** What a stream holds; Safari has no asynchronous iteration of streams. */
  async function* chunks(stream) {
    const reader = stream.getReader();
    try {
      for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  /** The JSON objects of a stream of server-sent events, up to `[DONE]`. */
  async function* events(body) {
    let buffer = "";
    for await (const piece of chunks(body.pipeThrough(new TextDecoderStream()))) {
      const blocks = (buffer + piece).split(/\r?\n\r?\n/);
      buffer = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
        if (data[0] === "[DONE]") return;
        if (data.length) yield JSON.parse(data.join("\n"));
      }
    }
  }

  /** The server's models, as it lists them. */
  async function models(key) {
    return (await (await send("v1/models", key)).json()).data;
  }

  /** The pieces of an answer: `content`, `reasoning`, `reason` of its end, and `numTokens`, where a piece has them. */
  async function* answer(isChat, body, key, signal) {
    const response = await send(isChat ? "v1/chat/completions" : "v1/completions", key, {
      method: "POST", body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }), signal,
    });
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      const delta = (isChat ? choice?.delta : { content: choice?.text }) ?? {};
      yield {
        content: delta.content ?? "", reasoning: delta.reasoning_content ?? "", reason: choice?.finish_reason,
        numTokens: event.usage?.completion_tokens,
      };
    }
  }

  return { models, answer };
})();
