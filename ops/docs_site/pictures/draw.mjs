// Draws every dashboard from a running Prometheus: node draw.mjs http://127.0.0.1:9090 FOLDER [MINUTES [END]]
// END is a time such as 2026-11-28T18:30:00Z, now if not given. Needs `npm install` here once, and a Chromium (CHROMIUM
// names it; /usr/bin/chromium otherwise).
import { build } from 'esbuild';
import { chromium } from 'playwright-core';
import { mkdirSync, readFileSync, readdirSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const [prometheus, folder, minutes = '15', end = new Date().toISOString()] = process.argv.slice(2);
if (!prometheus || !folder) throw new Error('usage: node draw.mjs PROMETHEUS_URL FOLDER [MINUTES [END]]');
const here = dirname(fileURLToPath(import.meta.url)), dashboards = join(here, '../../dashboards');
const names = readdirSync(dashboards).filter((file) => file.endsWith('.json')).map((file) => file.slice(0, -5));
const SCRAPE_S = 5, STEP_S = 10;

const { resolve } = createRequire(import.meta.url);
const style = readFileSync(resolve('uplot/dist/uPlot.min.css'), 'utf8');
const bundle = await build({
  entryPoints: [join(here, 'page.jsx')],
  bundle: true, write: false, minify: true, format: 'iife',
  // Their ES modules are `.mjs`, in which bundlers take `module.exports` for the default of packages without one.
  alias: Object.fromEntries(['@grafana/ui', '@grafana/data'].map((name) => [name, resolve(name)])),
  loader: { '.svg': 'text', '.woff': 'empty', '.woff2': 'empty', '.css': 'empty' },
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
});

function page(name) {
  const dashboard = JSON.parse(readFileSync(join(dashboards, `${name}.json`), 'utf8'));
  const to = Math.floor(Date.parse(end) / 1000 / STEP_S) * STEP_S, from = to - Number(minutes) * 60;
  const picture = JSON.stringify({ dashboard, from, to, step: STEP_S, scrape: SCRAPE_S });
  return `<!doctype html><meta charset="utf-8"><style>*{box-sizing:border-box}${style}</style><div id="root"></div><script>window.picture=${picture}</script><script src="/page.js"></script>`;
}

// The page asks its own origin, which hands queries on to Prometheus.
const server = createServer(async (request, response) => {
  if (request.url === '/page.js') return response.end(bundle.outputFiles[0].text);
  if (!request.url.startsWith('/api/')) return response.end(names.includes(request.url.slice(1)) ? page(request.url.slice(1)) : '');
  const answer = await fetch(prometheus + request.url);
  response.writeHead(answer.status, { 'content-type': 'application/json' }).end(await answer.text());
});
await new Promise((ready) => server.listen(0, '127.0.0.1', ready));

const flags = ['--no-sandbox', '--disable-gpu', '--disable-background-networking', '--disable-component-update', '--disable-sync'];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: flags });
mkdirSync(folder, { recursive: true });
try {
  for (const name of names) {
    const tab = await browser.newPage({ locale: 'en-US', viewport: { width: 1352, height: 800 } });
    tab.on('pageerror', (error) => console.error(name, error.message));
    await tab.goto(`http://127.0.0.1:${server.address().port}/${name}`, { timeout: 120_000 });
    await tab.waitForFunction(() => document.title !== '', null, { timeout: 120_000 });
    const title = await tab.title();
    if (title !== 'drawn') throw new Error(`${name}: ${title}`);
    await tab.screenshot({ path: join(folder, `${name}.png`), fullPage: true });
    console.log(join(folder, `${name}.png`));
    await tab.close();
  }
} finally {
  await browser.close();
  server.close();
}
