// conversations: trees of messages, in the storage of the browser. A message that is edited or written again becomes a
// second child of the one before it; which child is shown is remembered.
//
// A conversation: {id, name, model, system, params, nodes, chosen, at}. A node: {id, parent, role, text, images,
// reasoning, turn}; `parent` of the first ones is "". `turn` is what is known of how an answer was made.

const PREFIX = "kvcellar.chat.";
const OPEN = "kvcellar.open"; // the id of the one that was shown last
const SHOWS = "kvcellar.tokens"; // "no": tokens are not marked

const newId = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
export const empty = (model, of = {}) => ({ id: newId(), name: "", model, system: of.system || "", params: { ...of.params }, nodes: {}, chosen: {}, at: Date.now() });

// All that are kept, the last one first. What cannot be read is left where it is.
export function load() {
  const found = [];
  for (const key of Object.keys(localStorage)) {
    if (!key.startsWith(PREFIX)) continue;
    try {
      found.push(JSON.parse(localStorage.getItem(key)));
    } catch {
      continue;
    }
  }
  return found.sort((a, b) => b.at - a.at);
}

// "" or why it could not be kept: storage has a limit, mostly of 5 MB.
export function save(one) {
  try {
    localStorage.setItem(PREFIX + one.id, JSON.stringify(one));
    localStorage.setItem(OPEN, one.id);
    return "";
  } catch {
    return "The storage of this browser is full: what is new here is lost when the page is closed. Delete a conversation.";
  }
}

export const remove = (one) => localStorage.removeItem(PREFIX + one.id);
export const lastOpen = () => localStorage.getItem(OPEN);
export const marksShown = () => localStorage.getItem(SHOWS) !== "no";
export const showMarks = (yes) => localStorage.setItem(SHOWS, yes ? "yes" : "no");

export function add(one, parent, role, text, images = []) {
  const node = { id: newId(), parent, role, text, images, reasoning: "", turn: null };
  one.nodes[node.id] = node;
  one.chosen[parent] = node.id;
  one.at = Date.now();
  if (!one.name && role === "user") one.name = text.trim().replace(/\s+/g, " ").slice(0, 40) || "An image";
  return node;
}

// Those that could be in the place of a node, itself among them, the oldest first.
export const variants = (one, node) => Object.values(one.nodes).filter((other) => other.parent === node.parent && other.role === node.role);

// The messages that are shown, from the first one on.
export function path(one) {
  const found = [];
  for (let id = one.chosen[""]; id && one.nodes[id]; id = one.chosen[id]) found.push(one.nodes[id]);
  return found;
}

export function pathTo(one, id) {
  const found = [];
  for (let node = one.nodes[id]; node; node = one.nodes[node.parent]) found.unshift(node);
  return found;
}

function message({ role, text, images }) {
  if (!images.length) return { role, content: text };
  return { role, content: [...images.map((url) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])] };
}

// The fields of a request that make its prompt. A model without a chat template continues the texts, one after another.
export function prompt(one, nodes, chats) {
  if (!chats) return { prompt: nodes.map((node) => node.text).join("") };
  const system = one.system.trim() ? [{ role: "system", content: one.system }] : [];
  return { messages: [...system, ...nodes.filter((node) => node.text || node.images.length).map(message)] };
}

// The parameters that are set; the others are those of the model.
export function sampling(one) {
  const set = Object.entries(one.params).filter(([, value]) => value !== "" && value !== undefined);
  return Object.fromEntries(set.map(([name, value]) => [name, name === "stop" ? value.split("\n").filter(Boolean) : Number(value)]));
}
