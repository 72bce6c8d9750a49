import type { Dispose } from '../model';
import type { KeptMesh, KeptMeshes } from '../panel/surroundings';
import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

/** How soon a connection that broke is tried anew (ms). */
const AGAIN_AFTER = 10_000;

/** Kept meshes, asked of the server's extension of monarch_kernel; a server without it has none. */
export class ServerKeptMeshes implements KeptMeshes {
  constructor(private readonly _settings: ServerConnection.ISettings) {}

  watch(changed: (meshes: readonly KeptMesh[]) => void): Dispose {
    let ended = false;
    let socket: WebSocket | undefined;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const again = () => {
      if (!ended) {
        timer = setTimeout(() => void begin(), AGAIN_AFTER);
      }
    };
    const begin = async () => {
      // By a request first: a server without the extension answers 404, where a socket would only fail.
      const response = await this._ask('kept', 'GET').catch(() => null);
      if (response?.status === 404 || ended) {
        return;
      }
      if (!response?.ok) {
        again();
        return;
      }
      changed(((await response.json()) as { meshes: KeptMesh[] }).meshes);
      socket = new this._settings.WebSocket(this._socketUrl());
      socket.onmessage = event => {
        const message = JSON.parse(String(event.data)) as { kind: string; meshes?: KeptMesh[] };
        if (message.kind === 'kept' && message.meshes && !ended) {
          changed(message.meshes);
        }
      };
      socket.onclose = again;
    };
    void begin();
    return () => {
      ended = true;
      clearTimeout(timer);
      socket?.close();
    };
  }

  async stop(name: string, force: boolean): Promise<void> {
    const response = await this._ask(`kept/${encodeURIComponent(name)}/stop`, 'POST', JSON.stringify({ force }));
    if (!response.ok) {
      const said = (await response.json().catch(() => ({}))) as { message?: string };
      throw new Error(said.message || `${response.status} ${response.statusText}`);
    }
  }

  private _ask(path: string, method: 'GET' | 'POST', body?: string): Promise<Response> {
    const url = URLExt.join(this._settings.baseUrl, 'monarch-kernel', 'api', path);
    return ServerConnection.makeRequest(url, { method, ...(body ? { body } : {}) }, this._settings);
  }

  private _socketUrl(): string {
    const { wsUrl, token, appendToken } = this._settings;
    const url = URLExt.join(wsUrl, 'monarch-kernel', 'api', 'kept', 'events');
    return appendToken && token ? `${url}?token=${encodeURIComponent(token)}` : url;
  }
}
