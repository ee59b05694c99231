"use strict";
// The page shows one run, tick by tick: of the scheduler, or on the second floor (fleet.js) of a fleet. Whatever the reader
// changes is asked of Python, which plays the whole run again: a tenth of a second, half a second for a fleet. Without
// Python there are the recorded runs of the scenes.

const $ = id => document.getElementById(id);
const SCENES = JSON.parse($("recorded").textContent), FLEETS = JSON.parse($("fleets").textContent);
const LETTERS = "ABCDEFGHIJKL", LAST = 60;  // of the ticks in which a request may arrive
const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#9a8c00"];
const SLIDERS = {num_blocks: ["blocks", 1, 64], block_size: ["tokens per block", 1, 16], seats: ["seats", 1, 8],
  budget: ["token budget", 1, 64]};
const SWITCHES = {prefix_cache: "prefix cache", chunks: "prompts may be cut into chunks",
  static: "static batches: no request joins until all have ended"};
const FIELDS = {arrival: [0, LAST], prompt: [1, 99], output: [1, 99], priority: [-9, 9], shared: [0, 99]};
const TRAY = {"short": {prompt: 4, output: 8}, "long prompt": {prompt: 24, output: 4}, "long output": {prompt: 4, output: 24},
  "urgent": {prompt: 4, output: 6, priority: -1}, "common beginning": {prompt: 18, output: 4, shared: 16}};
const STORED = "nanovllm scheduler";  // the reader's code outlives the page
const LEFT = 30, ROW = 26, BARS = 44, AXIS = 18;  // pixels of the time line

const ENGINE = {name: "engine", title: "One engine", scenes: SCENES, does: "play", pause: 420, sliders: SLIDERS,
  now: (tick, last) => `step ${tick} of ${last}`, draw() { drawLine(); drawState(); }, totals: engineTotals, knobs: sliders => [...sliders, ...switches()]};
FLEET.scenes = FLEETS;

const page = {floor: ENGINE, answering: null, resume: false, scene: null, setup: null, run: null, tick: 0, guessed: true, before: null, python: false, timer: null,
  cell: 20, asked: 0};

// --- small things ----------------------------------------------------------------------------------------------------

function colour(name) {
  const i = LETTERS.indexOf(name);
  return i < PALETTE.length ? PALETTE[i] : `hsl(${(i * 137.5) % 360} 60% 62%)`;
}

function ink(name) {
  return name === "A" ? "#fff" : "#000";  // all colours but the first are too light for white
}

function element(tag, properties = {}, ...children) {
  const {style, data, ...rest} = properties, node = Object.assign(document.createElement(tag), rest);
  Object.assign(node.style, style);
  Object.assign(node.dataset, data);
  node.append(...children);
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function chip(name, text = name) {
  return element("span", {className: "chip", style: {background: colour(name), color: ink(name)}}, text);
}

function sentence(text) {  // with each request's letter, and each replica, in its colour
  const named = part => chip(part.length > 1 ? tint(part.split(" ")[1]) : part, part);
  return text.split(/\b([A-L]|[Rr]eplica \d+)\b/).map((part, i) => i % 2 ? named(part) : part);
}

function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

// --- Python ----------------------------------------------------------------------------------------------------------

let worker = null, asked = 0;
const answers = new Map();  // that are still to come

function post(message) {
  return new Promise((resolve, reject) => {
    const id = asked++;
    answers.set(id, {resolve, reject});
    worker.postMessage({id, ...message});
  });
}

async function ask(question) {
  return JSON.parse(await post({question: JSON.stringify(question)}));
}

async function startPython(assets) {
  const began = performance.now();
  worker = new Worker(URL.createObjectURL(new Blob([$("worker").textContent])));
  worker.onmessage = ({data: {id, answer, error}}) => {
    const {resolve, reject} = answers.get(id);
    answers.delete(id);
    if (error) reject(new Error(error)); else resolve(answer);
  };
  worker.onerror = event => answers.forEach(({reject}) => reject(new Error(event.message)));
  await post({assets});
  const {python, holes, ours} = await ask({do: "hello"});
  let events = 0, same = true;
  for (const scene of SCENES) {
    const {run, ...setup} = scene, live = await ask({do: "play", setup});
    same = same && JSON.stringify(live) === JSON.stringify(run);
    events += run.events.length;
  }
  const seconds = ((performance.now() - began) / 1000).toFixed(1);
  const verdict = same ? `gives the same ${events} events as the Python that built the page` : "DIFFERS from the Python that built the page";
  $("python").textContent = `nanovllm's own scheduler decides here, in Python ${python}, which started in ${seconds} s and ` +
    `${verdict}.`;
  return {holes, ours};
}

function change(edit = () => {}) {
  page.resume ||= page.floor.live && page.timer !== null;  // a fleet plays on
  stop();
  edit(page.setup);
  page.guessed = true;
  drawQuestion();
  page.answering = replay(++page.asked, page.answering);
  return page.answering;
}

async function replay(asked, before) {
  await before;  // of all changes that are made until the answer comes, only the last one is asked
  const {scene} = page, setup = structuredClone(page.setup), code = $("mine").checked ? $("code").value : null;
  if (asked !== page.asked) return;
  const run = {...await ask({do: page.floor.does, setup, code}), setup};
  // Something was changed meanwhile: the picture of a fleet follows with a delay, that of the engine waits.
  if (scene !== page.scene || (asked !== page.asked && !page.floor.live)) return;
  if (!run.frames.length) {
    $("why").replaceChildren(element("li", {className: "error"}, run.error));
    return;
  }
  page.before = page.before || page.run.totals;
  page.run = run;
  show(Math.min(page.tick, run.frames.length - 1));
  if (run.error) show(run.frames.length - 1);
  if (page.resume && asked === page.asked) {
    page.resume = false;
    play();
  }
}

// --- the time line ---------------------------------------------------------------------------------------------------

function drawLine() {
  const {run, setup, tick} = page, requests = setup.requests, frames = run.frames;
  const ticks = Math.max(frames.length, ...requests.map(r => r.arrival + 1)) + 1, room = $("line").clientWidth - LEFT - 4;
  const cell = page.cell = Math.max(13, Math.min(34, room / ticks)), rows = AXIS + requests.length * ROW;
  const height = rows + BARS + 8, picture = svg("svg", {width: LEFT + ticks * cell + 2, height, role: "group",
    "aria-label": "time line: one row for each request, one column for each step"});
  const x = t => LEFT + t * cell, rect = (t, y, h, name, inset = 1) =>
    picture.append(svg("rect", {x: x(t) + inset, y, width: cell - 2 * inset, height: h, rx: 2, class: name}));
  const write = (t, y, text, name = "") =>
    picture.append(svg("text", {x: x(t) + cell / 2, y, "text-anchor": "middle", class: name}, text));
  picture.append(svg("rect", {x: x(tick), y: 0, width: cell, height, class: "now"}));
  for (let t = 0; t < ticks; t += 5) write(t, 12, t);
  const until = page.guessed ? frames.length : tick + 1;  // nobody sees the future who has to guess it
  requests.forEach(({name, arrival}, i) => {
    const y = AXIS + i * ROW;
    frames.slice(0, until).forEach((frame, t) => {
      const share = frame.shares[name];
      if (share) {
        rect(t, y + 3, ROW - 8, share[0]);
        if (share[1] > 1 && cell >= 13) write(t, y + 16, share[1], "share");
      } else if (frame.running.includes(name)) rect(t, y + 5, ROW - 12, "idle", 2);
      else if (frame.waiting.includes(name) || frame.held.includes(name)) rect(t, y + 10, 4, "waiting", 0);
    });
    for (const e of run.events) {
      if (e.type === "preempted" && e.request === name && e.tick < until) write(e.tick, y + 17, "✕", "cross");
    }
    const flag = svg("g", {class: "flag", tabindex: page.python ? 0 : -1, role: "slider", "data-flag": name,
      "aria-label": `arrival of ${name}`, "aria-valuemin": 0, "aria-valuemax": LAST, "aria-valuenow": arrival});
    flag.append(svg("rect", {x: x(arrival) - 21, y: y + 2, width: 19, height: ROW - 6, rx: 5, fill: colour(name)}),
      svg("text", {x: x(arrival) - 11.5, y: y + 16, "text-anchor": "middle", style: `fill:${ink(name)}`}, name));
    picture.append(flag);
  });
  frames.slice(0, until).forEach((frame, t) => {  // tokens of each step, as high as their share of the budget
    let y = rows + BARS + 4;
    for (const kind of ["decode", "prefill", "again"]) {
      const tokens = Object.values(frame.shares).reduce((n, share) => n + (share[0] === kind ? share[1] : 0), 0);
      const h = tokens / setup.budget * BARS;
      if (tokens) rect(t, y -= h, h, kind);
    }
  });
  const used = frames.slice(0, until).map((frame, t) => {
    const y = rows + 4 + BARS * frame.free.length / Math.max(1, setup.num_blocks);
    return `${t ? "L" : "M"}${x(t)} ${y}H${x(t + 1)}`;
  });
  picture.append(svg("path", {d: used.join("") || "M0 0", class: "use"},
    svg("title", {}, "line: share of the blocks in use; bars: share of the token budget")));
  const focused = document.activeElement && document.activeElement.getAttribute("data-flag");
  const scrolled = $("line").scrollLeft;
  $("line").replaceChildren(picture);
  $("line").scrollLeft = scrolled;
  if (focused) picture.querySelector(`[data-flag="${focused}"]`)?.focus();
}

function tickAt(clientX) {
  const box = $("line").firstChild.getBoundingClientRect();
  return Math.floor((clientX - box.left - LEFT) / page.cell);
}

function moveArrival(name, arrival) {
  change(setup => { setup.requests.find(r => r.name === name).arrival = Math.max(0, Math.min(LAST, arrival)); });
  drawRequests();
  drawLine();
}

function add(kind, arrival) {
  const name = [...LETTERS].find(letter => page.setup.requests.every(r => r.name !== letter));
  if (name === undefined || !page.python) return;
  const request = {name, arrival: Math.max(0, Math.min(LAST, arrival)), prompt: 4, output: 8, priority: 0, shared: 0};
  change(setup => setup.requests.push({...request, ...TRAY[kind]}));
  drawRequests();
}

function remove(name) {
  if (page.setup.requests.length === 1) return;
  change(setup => { setup.requests = setup.requests.filter(r => r.name !== name); });
  drawRequests();
}

// --- how things stand at a tick --------------------------------------------------------------------------------------

function drawState() {
  const frame = page.run.frames[page.tick], {setup} = page;
  $("whose").textContent = $("mine").checked ? "What your scheduler decides in this step" : "What the engine decides in this step";
  const line = ([kind, text]) => element("li", {className: kind}, ...sentence(text));
  $("why").replaceChildren(...frame.why.map(line), ...frame.after.map(line));
  if (!frame.why.length && !frame.after.length) $("why").append(element("li", {}, "No request is in the engine."));

  const seats = frame.running.map(name => element("span", {className: "seat", style: {borderStyle: "solid",
    borderColor: colour(name)}}, chip(name), ` ${frame.known[name]}`));
  while (seats.length < setup.seats) seats.push(element("span", {className: "seat none"}, "empty"));
  const queue = (label, nodes) => element("div", {className: "row"}, element("b", {}, label), ...nodes);
  const chips = names => names.length ? names.map(name => chip(name)) : [element("span", {className: "none"}, "nobody")];
  $("queues").replaceChildren(queue("seats", seats), queue("waiting", chips(frame.waiting)));
  if (setup.static) $("queues").append(queue("next batch", chips(frame.held)));

  const shares = Object.entries(frame.shares);
  $("budget").replaceChildren(...shares.map(([name, [, tokens]]) => element("span", {style: {background: colour(name),
    color: ink(name), width: `${100 * tokens / setup.budget}%`}, title: `${name}: ${count(tokens, "token")}`},
    tokens / setup.budget > .12 ? `${name} ${tokens}` : tokens / setup.budget > .04 ? name : "")));
  const spent = shares.reduce((n, [, share]) => n + share[1], 0);
  $("budget").title = `${spent} of ${count(setup.budget, "token")}`;

  const owners = {}, findable = new Set(frame.findable);
  for (const [name, table] of Object.entries(frame.tables)) for (const block of table) (owners[block] ||= []).push(name);
  $("blocks").replaceChildren(...Array.from({length: setup.num_blocks}, (_, block) => {
    const held = owners[block], writer = frame.writers[block], node = element("div", {}, String(block));
    if (held) {
      const stripes = held.map((name, i) => `${colour(name)} ${i * 100 / held.length}% ${(i + 1) * 100 / held.length}%`);
      node.style.background = `linear-gradient(${stripes.join(", ")})`;
      node.style.color = ink(held[held.length >> 1]);
      node.title = `held by ${held.join(", ")}`;
    } else if (findable.has(block)) {
      node.style.borderColor = colour(writer);
      node.style.background = `color-mix(in srgb, ${colour(writer)} 22%, transparent)`;
      node.title = `free; holds text of ${writer} that can be found`;
    } else node.title = "free";
    return node;
  }));
  const next = frame.free.slice(0, 12).map(block => element("span", {style: findable.has(block)
    ? {borderColor: colour(frame.writers[block]), borderWidth: "2px"} : {}}, String(block)));
  const more = frame.free.length > next.length ? [`and ${frame.free.length - next.length} more`] : [];
  $("free").replaceChildren(...(next.length ? ["Free list, next to be taken first: ", ...next, ...more] : ["No block is free."]));
}

function figure(name, words) {
  const value = page.run.totals[name], was = (page.before || {})[name];
  return words(value) + (was !== undefined && was !== value ? ` (before: ${was})` : "");
}

function engineTotals() {
  const {totals} = page.run, first = Object.entries(totals.first).flatMap(([name, ticks]) => [" ", chip(name), ` ${ticks}`]);
  return [[figure("steps", n => count(n, "step")), figure("tokens", n => count(n, "new token")),
    figure("preemptions", n => count(n, "preemption")), figure("again", n => `${count(n, "token")} computed again`),
    figure("cached", n => `${n} found in the prefix cache`)].join(" · ") + " · steps to the first token:", ...first];
}

function drawQuestion() {
  const {scene, guessed} = page, box = $("question");
  box.hidden = !scene.question;
  if (!scene.question) return;
  const choose = i => {
    page.guessed = true;
    page.guess = i;
    drawQuestion();
    show(0);
    play();
  };
  const buttons = scene.answers.map((answer, i) => element("button", {disabled: guessed, onclick: () => choose(i),
    className: guessed && i === scene.right ? "on" : ""}, answer));
  box.replaceChildren(element("h2", {}, "Guess first"), element("p", {}, ...sentence(scene.question)),
    element("div", {className: "answers"}, ...buttons));
  if (guessed && page.guess !== undefined) {
    const right = page.guess === scene.right;
    box.append(element("p", {}, element("span", {className: right ? "good" : "bad"}, right ? "Right. " : "No. "),
      ...sentence(scene.because)));
  }
}

function show(tick) {
  page.tick = Math.max(0, Math.min(page.run.frames.length - 1, tick));
  $("tick").max = page.run.frames.length - 1;
  $("tick").value = page.tick;
  for (const id of ["tick", "back", "next", "play"]) $(id).disabled = !page.guessed;
  $("now").textContent = page.floor.now(page.tick, page.guessed ? page.run.frames.length - 1 : "?");
  page.floor.draw();
  $("totals").hidden = !page.guessed;
  $("totals").replaceChildren(...page.floor.totals());
  const line = $("line"), at = LEFT + page.tick * page.cell - line.scrollLeft;
  if (at < LEFT || at + page.cell > line.clientWidth) line.scrollLeft += at - line.clientWidth / 2;
}

function stop() {
  clearInterval(page.timer);
  page.timer = null;
  $("play").textContent = "▶ play";
}

function play() {
  if (page.timer !== null) return stop();
  if (page.tick === page.run.frames.length - 1) show(0);
  $("play").textContent = "❚❚ pause";
  page.timer = setInterval(() => page.tick >= page.run.frames.length - 1 ? stop() : show(page.tick + 1), page.floor.pause);
}

function enter(floor) {
  page.floor = floor;
  document.body.dataset.floor = floor.name;
  $("floors").replaceChildren(...[ENGINE, FLEET].map(other => element("button", {className: other === floor ? "on" : "",
    ariaPressed: other === floor, onclick: () => enter(other)}, other.title)));
  $("scenes").replaceChildren(...floor.scenes.map(scene => element("button", {onclick: () => open(scene)}, scene.title)));
  open(floor.scenes[0]);
}

function open(scene) {
  stop();
  const {run, ...setup} = structuredClone(scene), {floor} = page;
  if (floor === ENGINE) setup.requests = setup.requests.map(r => ({priority: 0, shared: 0, ...r}));
  const defaults = floor === ENGINE ? {prefix_cache: true, chunks: true, static: false} : {threshold: 0, deaths: []};
  Object.assign(page, {scene, run, tick: 0, guessed: false, guess: undefined, before: null, asked: page.asked + 1,
    resume: false});
  page.setup = {...defaults, ...setup};
  run.setup = structuredClone(page.setup);
  [...$("scenes").children].forEach((button, i) => { button.className = floor.scenes[i] === scene ? "on" : ""; });
  drawQuestion(); drawKnobs();
  if (floor === ENGINE) drawRequests();
  show(0);
  if (floor === ENGINE && $("mine").checked) change();
}

// --- what the reader may change --------------------------------------------------------------------------------------

function drawKnobs() {
  const {setup, floor} = page;
  const sliders = Object.entries(floor.sliders).map(([key, [label, min, max, step = 1]]) => {
    const input = element("input", {type: "range", min, max, step, value: setup[key], ariaLabel: label});
    const output = element("output", {}, String(setup[key]));
    input.oninput = () => change(changed => { output.textContent = changed[key] = Number(input.value); });
    return element("label", {}, label, input, output);
  });
  $("sliders").replaceChildren(...floor.knobs(sliders));
}

function switches() {
  const mine = $("mine").checked;
  return Object.entries(SWITCHES).map(([key, label]) => {
    const input = element("input", {type: "checkbox", checked: page.setup[key], disabled: mine && key !== "static"});
    input.onchange = () => change(changed => { changed[key] = input.checked; });
    return element("label", {className: "switch"}, input, label);
  });
}

function drawRequests() {
  $("requests").replaceChildren(...page.setup.requests.map(request => {
    const row = element("tr", {}, element("td", {}, chip(request.name)));
    for (const [field, [min, max]] of Object.entries(FIELDS)) {
      const input = element("input", {type: "number", min, max, value: request[field]});
      input.ariaLabel = `${field} of ${request.name}`;
      input.onchange = () => change(() => {
        input.value = request[field] = Math.max(min, Math.min(max, Math.round(Number(input.value)) || 0));
      });
      row.append(element("td", {}, input));
    }
    const button = element("button", {title: `remove ${request.name}`, onclick: () => remove(request.name)}, "×");
    row.append(element("td", {}, button));
    return row;
  }));
}

function follow(event, move, drop) {  // a drag: the pointer may leave what it took hold of
  event.preventDefault();
  const moved = e => Math.hypot(e.clientX - event.clientX, e.clientY - event.clientY) > 4;
  let began = false;
  const onmove = e => { if (began ||= moved(e)) move(e); };
  const end = e => {
    removeEventListener("pointermove", onmove);
    removeEventListener("pointerup", end);
    removeEventListener("pointercancel", end);
    drop(e, began);
  };
  addEventListener("pointermove", onmove);
  addEventListener("pointerup", end);
  addEventListener("pointercancel", end);
}

function listen() {
  $("tick").oninput = () => { stop(); show(Number($("tick").value)); };
  $("back").onclick = () => { stop(); show(page.tick - 1); };
  $("next").onclick = () => { stop(); show(page.tick + 1); };
  $("play").onclick = play;
  addEventListener("resize", () => show(page.tick));
  addEventListener("keydown", event => {
    const at = event.target, flag = at.getAttribute?.("data-flag");
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (flag && page.python && (step || event.key === "Delete")) {
      if (step) moveArrival(flag, Number(at.getAttribute("aria-valuenow")) + step); else remove(flag);
    } else if (/INPUT|TEXTAREA|SELECT/.test(at.tagName) || !page.guessed || event.ctrlKey || event.altKey || event.metaKey) return;
    else if (step) { stop(); show(page.tick + step); }
    else if (event.key === " " && !/BUTTON|SUMMARY/.test(at.tagName)) play();
    else return;
    event.preventDefault();
  });
  $("line").onpointerdown = event => {
    const flag = event.target.closest("[data-flag]")?.getAttribute("data-flag");
    if (!flag) {
      if (page.guessed) { stop(); show(tickAt(event.clientX)); }
    } else if (page.python) {
      follow(event, e => moveArrival(flag, tickAt(e.clientX + 12)), () => {});
    }
  };
  $("tray").append(...Object.keys(TRAY).map(kind => {
    const button = element("button", {}, kind), ghost = element("span", {id: "ghost", className: "chip"}, kind);
    button.onpointerdown = event => follow(event, e => {
      Object.assign(ghost.style, {left: `${e.clientX}px`, top: `${e.clientY}px`, background: "#e69f00", color: "#000"});
      document.body.append(ghost);
    }, (e, began) => {
      ghost.remove();
      const box = $("line").getBoundingClientRect(), inside = e.clientY > box.top && e.clientY < box.bottom;
      if (!began) add(kind, page.tick);
      else if (inside) add(kind, tickAt(e.clientX));
    });
    button.onkeydown = event => { if (event.key === "Enter" || event.key === " ") add(kind, page.tick); };
    return button;
  }));
}

// --- the reader's scheduler ------------------------------------------------------------------------------------------

function offerEditor({holes, ours}) {
  const code = $("code"), numbers = () => {
    $("numbers").textContent = code.value.split("\n").map((_, i) => i + 1).join("\n");
    $("numbers").scrollTop = code.scrollTop;
  };
  const put = text => {
    code.value = text;
    code.oninput();
    const line = text.slice(0, text.indexOf("# exercise")).split("\n").length;
    code.scrollTop = code.scrollHeight * (line - 3) / text.split("\n").length;
  };
  code.oninput = () => {
    numbers();
    if (kept === null) localStorage.setItem(STORED, code.value);
    if ($("mine").checked) change();
  };
  code.onscroll = numbers;
  code.onkeydown = event => {
    if (event.key === "Escape") code.dataset.leave = "yes";
    else if (event.key === "Tab" && !event.shiftKey && !code.dataset.leave) {
      event.preventDefault();
      code.setRangeText("    ", code.selectionStart, code.selectionEnd, "end");
      code.oninput();
    }
  };
  code.onfocus = () => delete code.dataset.leave;
  let kept = null;  // the reader's code, while ours is shown
  $("holes").onclick = () => put(holes);
  $("ours").onclick = () => {
    const shown = kept ?? ours;
    kept = kept === null ? code.value : null;
    $("ours").textContent = kept === null ? "Show ours" : "Back to mine";
    put(shown);
  };
  $("mine").onchange = () => { drawKnobs(); change(); };
  $("test").onclick = async () => {
    const {tests} = await ask({do: "test", code: code.value}), told = new Set();
    const passed = tests.filter(test => test.passed).length;
    $("tests").replaceChildren(element("li", {}, `${passed} of ${tests.length} tests pass.`), ...tests.map(test => {
      const item = element("li", {className: test.passed ? "good" : "bad"}, `${test.passed ? "✓" : "✕"} ${test.words}`);
      if (!test.passed && !told.has(test.message)) item.append(element("pre", {}, test.message));
      told.add(test.message);  // an open hole fails many tests, and is shown once
      return item;
    }));
  };
  $("own").hidden = false;
  put(localStorage.getItem(STORED) ?? holes);
}

listen();
enter(ENGINE);
const assets = JSON.parse($("assets").textContent);
if (Object.keys(assets).length) {
  $("knobs").disabled = $("people").disabled = true;
  startPython(assets).then(texts => {
    page.python = true;
    $("knobs").disabled = $("people").disabled = false;
    offerEditor(texts);
    page.floor.draw();
    return checkFleets();
  }).catch(error => { $("python").textContent = `Python does not start here (${error.message}), so the scenes are recorded.`; });
} else {
  $("knobs").disabled = $("people").disabled = true;
  $("python").textContent = "This copy was built without Python for the browser, so the scenes are recorded and nothing in " +
    "them can be changed. `make scheduler` builds the live page on a machine with npm and a network.";
}
