import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { completeDom, find } from '../testing';
import { ComparisonGrid, type ComparedTensor, type ComparisonData } from './comparison';

function tensor(title: string, ratio: number | null, fields: Partial<ComparedTensor> = {}): ComparedTensor {
  const plain = { phase: 'forward', micro: 0, ranks: '0-1', line: 'train.py:7', suggests: '', consequence: false };
  return { ...plain, title, ratio, ...fields };
}

/** Three modules and two steps; the first wrong tensor is of `up` in step 0, and `down` has no second step. */
const DATA: ComparisonData = {
  sentence: 'Different from step 0, forward: output of up.',
  equal: false,
  modules: ['', 'up', '<b>down</b>'],
  steps: [0, 1],
  cells: [
    { row: 0, column: 0, ratio: 0, tensors: [tensor('input 0 of the model', 0)], more: 0 },
    { row: 0, column: 1, ratio: null, tensors: [tensor('output of the model', null, { consequence: true })], more: 0 },
    {
      row: 1,
      column: 0,
      ratio: 12_345,
      tensors: [tensor('output of up', 12_345, { suggests: 'twice <i>too large</i>' }), tensor('input 0 of up', 0.2)],
      more: 3
    },
    { row: 1, column: 1, ratio: 20, tensors: [tensor('output of up', 20)], more: 0 },
    { row: 2, column: 0, ratio: 0.31, tensors: [tensor('output of down', 0.31)], more: 0 }
  ],
  first: [1, 0],
  notes: ['Steps 2 are not shown.']
};

let grid: ComparisonGrid;

beforeEach(() => {
  completeDom();
  grid = new ComparisonGrid(document.body, DATA);
});

afterEach(() => {
  grid.dispose();
  expect(document.body.children).toHaveLength(0);
});

const cells = () => [...document.querySelectorAll<HTMLButtonElement>('.mk-Comparison-cell')];
const cell = (name: string) => find<HTMLButtonElement>(document.body, `.mk-Comparison-cell[aria-label^="${name}"]`);
const press = (key: string) =>
  document.activeElement?.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
const focused = () => document.activeElement?.getAttribute('aria-label')?.split(':')[0];

describe('the grid of a comparison', () => {
  it('has a cell for each module and step, by its ratio to the tolerance', () => {
    expect(cells().map(each => [each.dataset['level'], each.textContent])).toEqual([
      ['same', ''],
      ['most', '∞'],
      ['most', '1e+4'],
      ['much', '20'],
      ['within', '']
    ]);
    expect(find(document.body, '.mk-Comparison-verdict').hasAttribute('data-bad')).toBe(true);
    expect(document.body.textContent).toContain('Steps 2 are not shown.');
  });

  it('outlines the first wrong one, and says so', () => {
    expect(cells().filter(each => each.hasAttribute('data-first'))).toEqual([cell('up, step 0')]);
    expect(cell('up, step 0').getAttribute('aria-label')).toBe('up, step 0: 1e+4 × tolerance, the first wrong tensor');
  });

  it('shows the tensors of a cell that is clicked, with line, ranks and guess, and hides them again', () => {
    const details = find(document.body, '.mk-Comparison-details');
    expect(details.hidden).toBe(true);
    cell('up, step 0').click();
    expect(details.hidden).toBe(false);
    const rows = [...details.querySelectorAll('tbody tr')].map(row => [...row.children].map(each => each.textContent));
    expect(rows).toEqual([
      ['forward', 'output of up', '0-1', 'train.py:7', '1e+4', 'twice <i>too large</i>'],
      ['forward', 'input 0 of up', '0-1', 'train.py:7', '0.2', '']
    ]);
    expect(details.textContent).toContain('and 3 more tensors that are closer');
    cell('the model, step 1').click();
    expect(details.textContent).toContain('a consequence');
    expect(cells().filter(each => each.getAttribute('aria-pressed') === 'true')).toHaveLength(1);
    cell('the model, step 1').click();
    expect(details.hidden).toBe(true);
  });

  it('is reached by keys: one stop of the tab key, the first wrong cell; arrows move, Escape closes', () => {
    expect(cells().filter(each => each.tabIndex === 0)).toEqual([cell('up, step 0')]);
    cell('up, step 0').focus();
    press('ArrowDown');
    expect(focused()).toBe('<b>down</b>, step 0');
    press('ArrowRight'); // it has no second step
    expect(focused()).toBe('<b>down</b>, step 0');
    press('ArrowUp');
    press('End');
    expect(focused()).toBe('up, step 1');
    press('ArrowUp');
    press('Home');
    expect(focused()).toBe('the model, step 0');
    expect(cells().filter(each => each.tabIndex === 0)).toHaveLength(1);
    (document.activeElement as HTMLButtonElement).click();
    find(document.body, '.mk-Comparison-tensors').focus();
    press('Escape');
    expect(find(document.body, '.mk-Comparison-details').hidden).toBe(true);
    expect(focused()).toBe('the model, step 0');
  });

  it('shows names and guesses as text, whatever they contain', () => {
    cell('up, step 0').click();
    expect(document.querySelectorAll('b, i')).toHaveLength(0);
    expect(document.body.textContent).toContain('<b>down</b>');
  });
});
