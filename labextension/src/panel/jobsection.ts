import type { Actions, JobView, Sent } from '../model';
import { completeJob, t } from '../model';
import { button, element, setText } from '../views/dom';
import { wordsOf } from './actionbar';
import { JobList } from './joblist';
import type { SectionContent } from './section';
import type { Surroundings } from './surroundings';

/** How often engines are asked while a person can see the answer (ms). */
const AGAIN = 20_000;

/** All jobs of this user, on all engines, as `%mesh jobs` lists them. */
export class JobSection implements SectionContent {
  private readonly _note = element('div', 'mk-Note', {}, t('Asking the engines …'));
  private readonly _again: HTMLButtonElement;
  private readonly _list: JobList;
  private readonly _timer: ReturnType<typeof setInterval>;
  private _disposed = false;

  constructor(
    private readonly _host: HTMLElement,
    private readonly _actions: Actions,
    surroundings: Surroundings,
    now: () => number
  ) {
    this._again = button('mk-Button', t('Ask again'), () => void this.ask());
    _host.append(this._note);
    this._list = new JobList(_host, t('Jobs'), _actions, surroundings, now, () => void this.ask());
    _host.append(element('div', 'mk-Bar-row', {}, this._again));
    this._timer = setInterval(() => {
      if (!document.hidden && !_host.closest('[hidden]')) {
        void this.ask();
      }
    }, AGAIN);
    void this.ask();
  }

  async ask(): Promise<void> {
    if (this._again.disabled) {
      return;
    }
    this._again.disabled = true;
    let jobs: Sent<JobView>[] = [];
    let note: string;
    try {
      const found = await this._actions.ask('jobs', '', []);
      jobs = found.jobs;
      note = [jobs.length ? '' : t('No job is in the list.'), ...found.notes].filter(Boolean).join('\n');
    } catch (error) {
      note = wordsOf(error);
    }
    if (this._disposed) {
      return;
    }
    this._again.disabled = false;
    setText(this._note, note);
    this._note.hidden = !note;
    this._list.update(jobs.map(completeJob));
  }

  dispose(): void {
    this._disposed = true;
    clearInterval(this._timer);
    this._list.dispose();
    this._host.replaceChildren();
  }
}
