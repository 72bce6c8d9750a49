/** Names, causes, stacks and output that would be markup are text in the views of the widget and of the panel. */

import { beforeEach, expect, it } from 'vitest';
import { completeJob, FeedClient, MeshStore, type Actions, type KernelMessage } from './model';
import { JobList } from './panel/joblist';
import { KernelPane } from './panel/kernelpane';
import { KeptSection } from './panel/keptsection';
import type { Surroundings } from './panel/surroundings';
import { AnsweredActions, aRank, aSnapshot, completeDom, find, settled } from './testing';
import { MeshBoard } from './views/board';
import { LogView } from './views/log';

const MARK = 'alert(1)';
const HOSTILE = [
  `<script>${MARK}</script>`,
  `<img src=x onerror=${MARK}>`,
  `"'><svg/onload=${MARK}>`,
  `</span></button><iframe srcdoc="<script>${MARK}</script>">`,
  `javascript:${MARK}`,
  `" onmouseover="${MARK}`,
  `&lt;img src=x onerror=${MARK}&gt;`,
  `${'${'}${MARK}}`,
  `<math><mtext><style><img src=x onerror=${MARK}>`
];
/** Attributes that show or compare text, and run nothing. */
const TEXTS = new Set(['title', 'aria-label', 'value', 'placeholder', 'id', 'aria-controls', 'for']);

/** What in a page is no text of this project: elements, handlers, and marks in attributes that mean something. */
function markup(root: ParentNode): string[] {
  const found = [...root.querySelectorAll('script, img, iframe, math, form, object, embed, link, base')].map(
    each => each.tagName
  );
  for (const each of root.querySelectorAll('*')) {
    for (const { name, value } of each.attributes) {
      const fits = !value.includes(MARK) || TEXTS.has(name) || name.startsWith('data-');
      if (name.startsWith('on') || !fits) {
        found.push(`${each.tagName} ${name}=${value}`);
      }
    }
  }
  return found;
}

beforeEach(() => {
  completeDom();
  document.body.replaceChildren();
});

const surroundings = (kept: object = { watch: () => () => undefined }) =>
  ({
    insertCode: async () => undefined,
    runCode: async () => undefined,
    confirm: async () => true,
    focusRank: async () => undefined,
    kept,
    memory: { get: () => 'open', set: () => undefined }
  }) as unknown as Surroundings;

it('finds markup', () => {
  for (const text of HOSTILE.slice(0, 4)) {
    document.body.innerHTML = text;
    expect(markup(document.body), text).not.toEqual([]);
  }
});

it.each(HOSTILE)('of a mesh, its ranks, hosts and failures: %s', async text => {
  const stop = { reason: text, file: text, line: 2, function: text, text };
  const actors = [{ name: text, cls: text, endpoint: text, since: 0, waiting: 1, calls: 1, failures: 1 }];
  const views = [
    aRank(0, { host: text, proc: text, doing: text, state: 'running', actors }),
    aRank(1, { host: text, cause: text, state: 'dead' }),
    aRank(2, { stop, state: 'stopped' })
  ];
  const snapshot = {
    ...aSnapshot(views),
    meshes: [{ key: 'u1', name: text, labels: [text], sizes: [3], hosts: [text, 'h1'], hang: text, kept: text }],
    hosts: [{ key: text, name: text }],
    failures: [{ text, ranks: [1], time: 1, mesh: 'u1' }],
    jobs: [{ key: text, engine: text, mesh: text, hosts: 2, reason: text, error: text, used_by: text }]
  };
  const store = new MeshStore();
  store.apply(snapshot as unknown as Parameters<MeshStore['apply']>[0]);
  const actions = new AnsweredActions();
  const board = new MeshBoard(document.body, store, actions, {});
  const client = new FeedClient(() => undefined);
  const pane = new KernelPane(document.body, client, surroundings(), text);
  pane.setVisible(true);
  client.receive(snapshot as unknown as KernelMessage);
  for (let rank = 0; rank < views.length; rank++) {
    board.select(rank);
    for (const name of ['Stack', 'Variables', 'Log']) {
      [...board.node.querySelectorAll('button')].find(each => each.textContent === name)?.click();
      const frames = [{ function: text, file: text, line: 1, text }];
      for (const each of actions.asked.splice(0)) {
        each.answer({
          stacks: [{ ranks: [rank], frames, note: text }],
          variables: [{ name: text, type: text, text, groups: [{ ranks: [rank], text }] }],
          lines: [[rank, 'stdout', text]],
          dropped: 0,
          text,
          notes: [text]
        });
      }
      await settled();
      expect(markup(document.body)).toEqual([]);
    }
  }
  expect(document.body.textContent).toContain(text);
  board.dispose();
  pane.dispose();
  client.dispose();
});

it.each(HOSTILE)('of logs, jobs and kept meshes: %s', async text => {
  const view = new LogView(document.body, new AnsweredActions(), { mesh: 'u1' });
  view.append([
    [0, 'stdout', text],
    [1, 'stderr', `\u001b[31m${text}\u001b[0m`]
  ]);
  const search = find<HTMLInputElement>(view.node, 'input[type=search]');
  search.value = text;
  search.dispatchEvent(new Event('input'));
  const list = new JobList(document.body, 'Jobs', {} as Actions, surroundings(), () => 100);
  list.update([
    completeJob({ key: text, engine: text, mesh: text, hosts: 1, reason: text, error: text, used_by: text })
  ]);
  const kept = [{ name: text, host: text, held_by: 0, meshes: [{ name: text, ranks: 4, alive: 3 }] }];
  const watch = (changed: (meshes: typeof kept) => void) => {
    changed(kept);
    return () => undefined;
  };
  new KeptSection(document.body, async () => null, surroundings({ watch, stop: async () => undefined })).setVisible(
    true
  );
  await settled();
  expect(markup(document.body)).toEqual([]);
  expect(document.body.textContent?.split(text).length).toBeGreaterThan(3);
  view.dispose();
});
