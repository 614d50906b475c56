// client: what the page asks the server: routes of OpenAI's API, those that tokenize, and what a model can do.

import { savedKey } from "/inspector/data.js";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Ids of images are larger than a number of JavaScript is exact: where the browser tells how they are written, they
// stay texts.
const exact = (name, value, context) => (isImage(value) && context?.source ? context.source : value);
export const isImage = (id) => typeof id === "string" || (Number.isInteger(id) && !Number.isSafeInteger(id));

async function send(path, body, signal) {
  const key = savedKey();
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { "content-type": "application/json" }) };
  const how = { method: body ? "POST" : "GET", body: body && JSON.stringify(body), headers, signal, cache: "no-store" };
  const response = await fetch(path, how);
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  throw new ApiError(response.status, found.error?.message || found.error || `status ${response.status}`);
}

async function ask(path, body, signal) {
  return JSON.parse(await (await send(path, body, signal)).text(), (name, value, context) => (typeof value === "number" ? exact(name, value, context) : value));
}

// Events of a stream, one by one. An event with an error is the last one.
export async function* events(path, body, signal) {
  const response = await send(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const found = (rest + part.value).split("\n\n");
    rest = found.pop();
    for (const event of found) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const value = JSON.parse(event.slice(6), (name, value, context) => (typeof value === "number" ? exact(name, value, context) : value));
      if (value.error) throw new ApiError(response.status, value.error.message);
      yield value;
    }
  }
}

export const modelNames = async () => (await ask("/v1/models")).data.map((one) => one.id);

// What the page has to know of a model: whether it takes images, and whether it has a chat template; without one its
// texts are continued. `why`: why there is no text at all.
export async function describe(model) {
  const [shown, tokenizer] = await Promise.all([ask("/api/show", { model }), ask(`/tokenizer_info?${new URLSearchParams({ model })}`)]);
  const found = { model, context: tokenizer.max_model_len, chats: tokenizer.chat_template !== null, images: shown.capabilities.includes("vision") };
  const why = found.chats ? "" : await ask("/tokenize", { model, content: "a" }).then(() => "", (error) => error.message);
  return { ...found, why };
}

export const hasInspector = () => send("/inspector").then(() => true, () => false);

// The text that each token adds. A character in several tokens is that of the last of them; images have no text.
export async function textsOf(model, ids) {
  const tokens = ids.filter((id) => !isImage(id));
  const pieces = tokens.length ? (await ask("/detokenize", { model, tokens, with_pieces: true })).pieces : [];
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const bytes = (piece) => (typeof piece === "string" ? new TextEncoder().encode(piece) : new Uint8Array(piece));
  let at = 0;
  return ids.map((id) => (isImage(id) ? "" : decoder.decode(bytes(pieces[at++]), { stream: true })));
}

// The tokens that the prompt of a chat or a text would have.
export async function promptIds(model, prompt, signal) {
  const what = prompt.messages ? { messages: prompt.messages, replay_tokens: true } : prompt;
  return (await ask("/tokenize", { model, ...what }, signal)).tokens;
}
