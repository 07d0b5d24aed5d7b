// Draws a dashboard's JSON with Grafana's own panel components and what a Prometheus answers to the panels' queries.
import {
  EventBusSrv, FieldType, ThemeContext, createDataFrame, createTheme, dateTime, getDisplayProcessor, reduceField, renderLegendFormat,
} from '@grafana/data';
import { BigValue, PanelChrome, PanelContextProvider, Table, TimeSeries } from '@grafana/ui';
import React from 'react';
import { createRoot } from 'react-dom/client';

const COLUMN = 56, ROW = 38, GAP = 8; // pixels of Grafana's grid: 24 columns
const theme = createTheme({ colors: { mode: 'light' } });
const { dashboard, from, to, step } = window.picture; // seconds
const range = { from: dateTime(from * 1000), to: dateTime(to * 1000) };
range.raw = { from: range.from, to: range.to };

/** The query as Grafana would send it, with every variable at "All". */
function filled(expression) {
  const span = `${to - from}s`, rate = `${Math.max(4 * window.picture.scrape, step)}s`;
  const known = { __rate_interval: rate, __interval: `${step}s`, __range: span };
  return expression.replace(/\$(?:\{(\w+)\}|(\w+))/g, (_, a, b) => known[a ?? b] ?? '.*');
}

async function ask(target) {
  const query = new URLSearchParams({ query: filled(target.expr), start: from, end: to, step });
  if (target.instant) query.set('time', to);
  const answer = await (await fetch(`/api/v1/query${target.instant ? '' : '_range'}?${query}`)).json();
  if (answer.status !== 'success') throw new Error(`${target.expr}: ${answer.error}`);
  return answer.data.result;
}

function name(target, metric) {
  if (target.legendFormat !== '__auto') return renderLegendFormat(target.legendFormat, metric);
  const labels = Object.entries(metric).filter(([key]) => key !== '__name__');
  return labels.map(([, value]) => value).join(' ') || filled(target.expr);
}

function shown(field, panel, index) {
  const { custom, ...defaults } = panel.fieldConfig.defaults;
  const thresholds = { ...defaults.thresholds, steps: defaults.thresholds.steps.map((s) => ({ ...s, value: s.value ?? -Infinity })) };
  const color = { mode: panel.type === 'timeseries' ? 'palette-classic' : 'thresholds' };
  const axes = { axisPlacement: 'auto', drawStyle: 'line', lineInterpolation: 'linear', showPoints: 'never', spanNulls: false };
  if (field.type === FieldType.number) {
    field.config = { ...field.config, ...defaults, thresholds, color, custom: { ...axes, ...custom } };
    override(field.config, panel.fieldConfig.overrides ?? []);
  }
  const known = field.values.filter(Number.isFinite), min = Math.min(...known), max = Math.max(...known);
  field.state = { seriesIndex: index, displayName: field.config.displayName, range: { min, max, delta: max - min } };
  field.display = getDisplayProcessor({ field, theme });
  return field;
}

/** Applies the overrides whose regular expression matches the field's name. */
function override(config, overrides) {
  for (const { matcher, properties } of overrides) {
    if (matcher.id !== 'byRegexp') throw new Error(`unknown matcher ${matcher.id}`);
    if (!new RegExp(matcher.options.slice(1, -1)).test(config.displayName)) continue;
    for (const { id, value } of properties) {
      if (id.startsWith('custom.')) config.custom[id.slice('custom.'.length)] = value;
      else config[id] = value;
    }
  }
}

/** One frame a line; missing steps are gaps. */
async function lines(panel) {
  const frames = [];
  for (const target of panel.targets) {
    for (const { metric, values } of await ask(target)) {
      const at = new Map(values.map(([time, value]) => [Math.round(time), Number(value)]));
      const times = Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, i) => from + i * step);
      const numbers = times.map((time) => at.get(time) ?? null).map((v) => (Number.isFinite(v) ? v : null));
      const frame = createDataFrame({
        refId: target.refId,
        fields: [
          { name: 'Time', type: FieldType.time, values: times.map((time) => time * 1000) },
          { name: 'Value', type: FieldType.number, values: numbers, config: { displayName: name(target, metric) } },
        ],
      });
      frame.fields.forEach((field) => shown(field, panel, frames.length));
      frames.push(frame);
    }
  }
  return frames;
}

/** The merged table that the panel's transformations make: a row for each set of labels, a column for each query. */
async function table(panel) {
  const rows = new Map(), names = panel.transformations[1].options.renameByName;
  for (const target of panel.targets) {
    for (const { metric, value } of await ask(target)) {
      const key = JSON.stringify(metric);
      rows.set(key, { ...(rows.get(key) ?? metric), [names[`Value #${target.refId}`]]: Number(value[1]) });
    }
  }
  const all = [...rows.values()], numbers = Object.values(names);
  const columns = [...new Set(all.flatMap(Object.keys))].sort((a, b) => numbers.indexOf(a) - numbers.indexOf(b));
  const frame = createDataFrame({
    fields: columns.map((column) => ({
      name: column,
      type: numbers.includes(column) ? FieldType.number : FieldType.string,
      values: all.map((row) => row[column] ?? null),
    })),
  });
  frame.fields.forEach((field) => shown(field, panel, 0));
  return frame;
}

const KINDS = {
  timeseries: async (panel) => {
    const frames = await lines(panel);
    return (width, height) =>
      frames.length === 0 ? <Nothing /> : (
        <PanelContextProvider value={{ eventBus: new EventBusSrv() }}>
          <TimeSeries frames={frames} timeRange={range} timeZone="utc" width={width} height={height} legend={panel.options.legend} options={panel.options} theme={theme} />
        </PanelContextProvider>
      );
  },
  stat: async (panel) => {
    const [frame] = await lines(panel);
    if (!frame) return () => <Nothing />;
    const field = frame.fields[1];
    const last = reduceField({ field, reducers: panel.options.reduceOptions.calcs })[panel.options.reduceOptions.calcs[0]];
    const value = field.display(last);
    return (width, height) => <BigValue value={{ ...value, title: '' }} sparkline={{ y: field, x: frame.fields[0] }} colorMode={panel.options.colorMode} graphMode="area" width={width} height={height} theme={theme} />;
  },
  table: async (panel) => {
    const data = await table(panel);
    return (width, height) => <Table data={data} width={width} height={height} timeRange={range} />;
  },
};

const Nothing = () => <div style={{ padding: 16, color: theme.colors.text.secondary }}>No data</div>;

function Panel({ panel, draw }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: GAP + x * COLUMN, top: GAP + y * ROW };
  return (
    <div style={place}>
      <PanelChrome title={panel.title} width={w * COLUMN - GAP} height={h * ROW - GAP}>{draw}</PanelChrome>
    </div>
  );
}

async function main() {
  const drawn = await Promise.all(dashboard.panels.map(async (panel) => [panel, await KINDS[panel.type](panel)]));
  const height = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h)) * ROW + 2 * GAP;
  Object.assign(document.body.style, { margin: 0, font: `${theme.typography.fontSize}px sans-serif`, background: theme.colors.background.canvas });
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <div style={{ position: 'relative', width: 24 * COLUMN + GAP, height }}>
        {drawn.map(([panel, draw]) => <Panel key={panel.id} panel={panel} draw={draw} />)}
      </div>
    </ThemeContext.Provider>,
  );
  setTimeout(() => { document.title = 'drawn'; }, 1500);
}

main().catch((error) => { document.title = `failed: ${error.message}`; console.error(error); });
