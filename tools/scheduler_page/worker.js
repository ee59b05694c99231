"use strict";
// Runs beside the page: unpacks Pyodide, puts the sources in its file system, and hands questions to `respond`.

async function unpacked(base64) {
  const {body} = await fetch("data:application/gzip;base64," + base64);
  return new Response(body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

async function start(assets) {
  const names = Object.keys(assets), contents = await Promise.all(names.map(name => unpacked(assets[name])));
  const file = Object.fromEntries(names.map((name, i) => [name, contents[i]]));
  // Pyodide asks for its files by address. There is none: everything is here.
  self.fetch = async address => {
    const type = String(address).endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
    return new Response(file[String(address).split("/").pop()], {headers: {"Content-Type": type}});
  };
  for (const name of ["pyodide.asm.js", "pyodide.js"]) importScripts(URL.createObjectURL(new Blob([file[name]])));
  const lock = JSON.parse(new TextDecoder().decode(file["pyodide-lock.json"]));
  const python = await loadPyodide({indexURL: "https://nowhere.invalid/", lockFileContents: lock, packageBaseUrl: "/"});
  python.unpackArchive(file["sources.zip"], "zip");
  const module = python.pyimport("tools.scheduler_page.in_browser");
  module.install();
  return module.respond;
}

let respond = null;
self.onmessage = async ({data: {id, assets, question}}) => {
  try {
    if (assets) respond = await start(assets);
    self.postMessage({id, answer: assets ? "" : respond(question)});
  } catch (error) {
    self.postMessage({id, error: String(error)});
  }
};
