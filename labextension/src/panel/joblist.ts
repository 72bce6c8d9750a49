import type { Actions, JobView } from '../model';
import { jobText, t } from '../model';
import { button, element, setAttribute, setText } from '../views/dom';
import { wordsOf } from './actionbar';
import type { Surroundings } from './surroundings';

/** How often the times of jobs are written anew (ms). */
const TICK = 1_000;

/** Jobs, each with where its hosts are, and a button that ends it after a question. Hidden while there is none. */
export class JobList {
  readonly node = element('div', 'mk-Jobs', { hidden: true });
  private readonly _list = element('ul', 'mk-List');
  private readonly _result = element('div', 'mk-Bar-result', { role: 'status' });
  private readonly _items = new Map<string, JobItem>();
  private readonly _timer: ReturnType<typeof setInterval>;

  /**
   * @param label - what they are, for screen readers.
   * @param _now - the controller's clock.
   * @param _killed - called when one was to be ended.
   */
  constructor(
    host: HTMLElement,
    label: string,
    private readonly _actions: Actions,
    private readonly _surroundings: Surroundings,
    private readonly _now: () => number,
    private readonly _killed: () => void = () => undefined
  ) {
    this._list.setAttribute('aria-label', label);
    this.node.append(this._list, this._result);
    host.append(this.node);
    this._timer = setInterval(() => this._tick(), TICK);
  }

  update(jobs: Iterable<JobView>): void {
    const shown = [...jobs];
    const keys = new Set(shown.map(job => job.key));
    for (const [key, item] of this._items) {
      if (!keys.has(key)) {
        item.node.remove();
        this._items.delete(key);
      }
    }
    for (const job of shown) {
      let item = this._items.get(job.key);
      if (!item) {
        item = new JobItem(job, () => void this._kill(job.key));
        this._items.set(job.key, item);
        this._list.append(item.node);
      }
      item.update(job, this._now());
    }
    this.node.hidden = !shown.length && !this._result.textContent;
  }

  dispose(): void {
    clearInterval(this._timer);
    this.node.remove();
  }

  private _tick(): void {
    if (!this.node.hidden) {
      this._items.forEach(item => item.tick(this._now()));
    }
  }

  private async _kill(key: string): Promise<void> {
    const job = this._items.get(key)?.job;
    if (!job) {
      return;
    }
    const lost = job.up ? t('Its hosts are given back, and what runs on them ends.') : t('It leaves the queue.');
    const whose = job.mesh ? t('It is for mesh %1.', job.mesh) : job.used_by ? t('Used by: %1.', job.used_by) : '';
    const question = t('End job %1 of %2?', job.key, job.engine);
    if (!(await this._surroundings.confirm(question, [whose, lost].filter(Boolean).join(' '), t('End job')))) {
      return;
    }
    try {
      const { text } = await this._actions.perform('kill_job', '', [], { job: key });
      this._say(text, false);
    } catch (error) {
      this._say(wordsOf(error), true);
    }
    this._killed();
  }

  private _say(text: string, bad: boolean): void {
    setText(this._result, text);
    setAttribute(this._result, 'data-bad', bad);
    this.node.hidden = false;
  }
}

class JobItem {
  readonly node: HTMLElement;
  private readonly _name = element('span', 'mk-Jobs-name');
  private readonly _state = element('span', 'mk-Jobs-state');

  constructor(
    public job: JobView,
    kill: () => void
  ) {
    const end = button('mk-Button', t('End'), kill, {
      'aria-label': t('End job %1', job.key),
      'data-deed': 'kill_job'
    });
    this.node = element('li', 'mk-Jobs-item', { 'data-job': job.key }, this._name, end, this._state);
  }

  update(job: JobView, now: number): void {
    this.job = job;
    setText(this._name, [job.mesh, job.engine, job.key].filter(Boolean).join(' · '));
    setAttribute(this._name, 'title', job.used_by ? t('Used by: %1', job.used_by) : undefined);
    setAttribute(this.node, 'data-bad', job.error !== '');
    this.tick(now);
  }

  tick(now: number): void {
    setText(this._state, jobText(this.job, now));
  }
}
