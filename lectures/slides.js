// Slides on a wide window, a page to scroll on a narrow one. D switches between day and night, S opens the speaker view.
const night = matchMedia("(prefers-color-scheme: dark)");
const wide = matchMedia("(min-width: 700px)");
const asked = new URLSearchParams(location.search);
const setTheme = theme => {
  const roots = [...document.querySelectorAll("iframe.film")].map(film => film.contentDocument?.documentElement);
  for (const root of [document.documentElement, ...roots.filter(Boolean)]) root.dataset.theme = theme;
};
document.querySelectorAll("iframe.film").forEach(film => { film.onload = () => setTheme(document.documentElement.dataset.theme); });

setTheme(asked.get("theme") || (night.matches ? "dark" : "light"));

// Whoever reads alone, on a telephone, is told at once; in a lecture the next slide tells
const choose = button => {
  const choices = button.parentElement;
  for (const other of choices.children) other.setAttribute("aria-pressed", other === button && other.ariaPressed !== "true");
  if (!wide.matches) choices.classList.add("told");
};
document.querySelectorAll(".choices button").forEach(button => { button.onclick = () => choose(button); });
const keysOfChoices = Object.fromEntries([1, 2, 3, 4, 5].map(key => [48 + key, () => {
  const button = Reveal.getCurrentSlide().querySelector(`.choices [data-key="${key}"]`);
  if (button) choose(button);
}]));

// The speaker view is a page that its plugin writes into a new window; it gets our style and the theme of the moment
const openWindow = window.open.bind(window);
window.open = (...where) => {
  const view = openWindow(...where);
  if (view) setTimeout(() => {
    const style = view.document.createElement("style");
    style.textContent = document.getElementById("speaker-style").textContent;
    view.document.head.append(style);
    view.document.documentElement.dataset.theme = document.documentElement.dataset.theme;
  });
  return view;
};

// The speaker view shows slides in small frames of its own, and asks for them with ?receiver
if (wide.matches || asked.has("receiver")) {
  document.getElementById("deck-style").media = "all";
  document.getElementById("page-style").media = "not all";
  const toggle = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  Reveal.initialize({
    width: 1280, height: 720, margin: 0, center: false, display: "flex", hash: true, slideNumber: "c/t",
    transition: "none", scrollActivationWidth: null, keyboard: { 68: toggle, ...keysOfChoices }, plugins: [RevealNotes],
    defaultTiming: 60, // with it the speaker view says whether one is early or late
  });
  Reveal.on("slidechanged", event => { // on from a question, to its answer
    const choices = event.previousSlide?.querySelector(".choices"), chosen = choices?.querySelector("[aria-pressed=true]");
    if (!choices || event.currentSlide !== event.previousSlide.nextElementSibling) return;
    choices.classList.add("told");
    const tag = event.currentSlide.querySelector(".tag");
    tag.dataset.tag ??= tag.textContent;
    tag.textContent = chosen ? `The guess: ${chosen.textContent}` : tag.dataset.tag;
  });
}
if (!asked.has("receiver")) wide.addEventListener("change", () => location.reload());
