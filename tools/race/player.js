// A clock for what has happened, which can be stopped, moved and slowed down, with its controls and keys.
// show: {duration, stops(), clock(t), draw(t)}; times in seconds of what is shown. from: where it stands at first.
// keys: further ones, each with its function.

function makePlayer(box, show, {speeds, speed, from = 0, keys = {}}) {
  let at = from, since = null;  // where it was when the clock last began to run, and when that was
  const button = (text, title, press) => Object.assign(element("button", "", text), {title, onclick: press});
  const now = () => Math.min(show.duration, since === null ? at : at + speed * (performance.now() - since) / 1e3);
  const draw = () => {
    const t = now();
    scrub.max = show.duration; scrub.value = t;
    clock.textContent = show.clock(t);
    show.draw(t);
    if (t >= show.duration && since !== null) stop();
  };
  const frame = () => { if (since !== null) { draw(); requestAnimationFrame(frame); } };
  const stop = () => { at = now(); since = null; play.textContent = "▶"; };
  const start = () => {
    if (at >= show.duration) at = 0;
    since = performance.now(); play.textContent = "❚❚"; requestAnimationFrame(frame);
  };
  const seek = t => { const ran = since !== null; at = Math.max(0, Math.min(show.duration, t)); since = ran ? performance.now() : null; draw(); };
  const step = direction => {
    stop();
    const stops = show.stops(), t = at;
    seek(direction > 0 ? stops.find(s => s > t + 1e-9) ?? show.duration : stops.findLast(s => s < t - 1e-9) ?? 0);
  };
  const setSpeed = chosen => {
    at = now(); since = since === null ? null : performance.now(); speed = chosen;
    [...rates.children].forEach((rate, i) => rate.setAttribute("aria-pressed", speeds[i] === speed));
  };
  const faster = by => setSpeed(speeds[Math.max(0, Math.min(speeds.length - 1, speeds.indexOf(speed) + by))]);
  const play = button("▶", "play or pause (space)", () => since === null ? start() : stop());
  const clock = element("output"), scrub = element("input"), rates = element("span", "rates");
  Object.assign(scrub, {type: "range", min: 0, step: "any", ariaLabel: "time", oninput: () => seek(Number(scrub.value))});
  rates.append(...speeds.map(rate => button(rate <= .01 ? `1/${Math.round(1 / rate)}` : `${rate}×`, "speed (+ and −)", () => setSpeed(rate))));
  box.append(button("◀", "one step back (←)", () => step(-1)), play, button("▶▏", "one step on (→)", () => step(1)), clock, scrub, rates);
  const pressed = {
    " ": () => play.click(), ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => seek(0),
    End: () => seek(show.duration), "+": () => faster(1), "-": () => faster(-1), Escape: () => parent.focus(), ...keys,
  };
  addEventListener("keydown", e => {
    if (e.ctrlKey || e.metaKey || e.altKey || !(e.key in pressed)) return;
    e.preventDefault();
    pressed[e.key]();
  });
  addEventListener("resize", draw);
  setSpeed(speed);
  const asked = /\bt=([\d.]+)/.exec(location.search + location.hash);
  if (asked) seek(Number(asked[1])); else draw();
  return {draw, seek};
}

function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

// The data of the page, unpacked, goes to `show`; its colours are those of the day or of the night.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function begin(show) {
  document.documentElement.dataset.theme ||= matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  unpack(document.getElementById("packed").textContent).then(show);
}
