// composer: where the next message is written. Images are picked, pasted or dropped, where the model takes some.

import { html, useEffect, useRef, useState } from "/inspector/vendor/preact-htm.js";

const [LARGE, SIDE] = [1_000_000, 1536]; // bytes of a file that is sent as it is; pixels of a side of one that is not

const read = (blob) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(blob);
});

// A data: URL. A large image is made smaller: a request, and the storage of a browser, hold some megabytes.
async function url(file) {
  if (file.size <= LARGE) return read(file);
  const image = await createImageBitmap(file);
  const by = Math.min(1, SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(by * image.width), Math.round(by * image.height)];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

export function Composer({ info, busy, last, send, stop }) {
  const [text, setText] = useState("");
  const [images, setImages] = useState([]);
  const [over, setOver] = useState(false);
  const [failed, setFailed] = useState("");
  const area = useRef(null);
  useEffect(() => area.current.focus(), [info.model]);
  useEffect(() => { if (!info.images) setImages([]); }, [info.images]);
  const ready = !busy && (text.trim() || images.length);

  async function take(files) {
    const found = [...files].filter((file) => file.type.startsWith("image/"));
    if (!found.length) return false;
    if (!info.images) return setFailed(`${info.model} takes no images.`), true;
    try {
      const urls = await Promise.all(found.map(url));
      setImages((before) => [...before, ...urls]);
      setFailed("");
    } catch {
      setFailed("This file is no image that the browser can read.");
    }
    return true;
  }

  function submit(event) {
    event?.preventDefault();
    if (!ready) return;
    send(text, images);
    [setText, setImages, setFailed].forEach((set, at) => set(at === 1 ? [] : ""));
  }

  function keys(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), submit());
    if (event.key === "Escape" && busy) stop();
  }

  const drag = (on) => (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    setOver(on);
  };
  const drop = (event) => (event.preventDefault(), setOver(false), take(event.dataTransfer.files));
  const label = info.chats ? "Your message" : "A text to continue";
  return html`<form class=${`composer ${over ? "over" : ""}`} onSubmit=${submit} onDragOver=${drag(true)} onDragLeave=${drag(false)} onDrop=${drop}>
    ${images.length > 0 && html`<ul class="thumbs" aria-label="images to send">${images.map((one, at) => html`<li key=${at}>
      <img src=${one} alt=${`image ${at + 1} to send`} />
      <button type="button" aria-label=${`remove image ${at + 1}`} onClick=${() => setImages(images.filter((_, other) => other !== at))}>×</button></li>`)}</ul>`}
    ${failed && html`<p class="failed" role="alert">${failed}</p>`}
    <label class="unseen" for="text">${label}</label>
    <textarea id="text" ref=${area} rows=${Math.min(10, Math.max(2, text.split("\n").length))} value=${text} placeholder=${info.chats ? `Message ${info.model}` : `${info.model} has no chat template: it continues texts`}
      onInput=${(event) => setText(event.target.value)} onKeyDown=${keys} onPaste=${(event) => { if (event.clipboardData.files.length) (event.preventDefault(), take(event.clipboardData.files)); }}></textarea>
    <div class="row">
      ${info.images && html`<label class="button pick">Add images<input type="file" accept="image/png,image/jpeg,image/webp,image/gif,image/bmp" multiple onChange=${(event) => (take(event.target.files), (event.target.value = ""))} /></label>`}
      <span class="note keys">Enter sends, Shift+Enter is a new line${busy ? ", Esc stops" : ""}</span>
      ${busy ? html`<button type="button" class="main" onClick=${stop}>Stop</button>` : html`<button type="submit" class="main" disabled=${!ready}>${last || info.chats ? "Send" : "Continue"}</button>`}
    </div>
  </form>`;
}
