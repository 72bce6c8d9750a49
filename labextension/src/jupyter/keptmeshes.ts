import type { KeptMesh, KeptMeshes } from '../panel/surroundings';
import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

/** Kept meshes, asked of the server's extension of monarch_kernel; a server without it has none. */
export class ServerKeptMeshes implements KeptMeshes {
  private _absent = false;

  constructor(private readonly _settings: ServerConnection.ISettings) {}

  async list(): Promise<KeptMesh[] | null> {
    if (this._absent) {
      return null;
    }
    const response = await this._ask('kept', 'GET');
    if (response.status === 404) {
      this._absent = true;
      return null;
    }
    if (!response.ok) {
      throw new ServerConnection.ResponseError(response);
    }
    return ((await response.json()) as { meshes: KeptMesh[] }).meshes;
  }

  async stop(name: string): Promise<void> {
    const response = await this._ask(`kept/${encodeURIComponent(name)}/stop`, 'POST');
    if (!response.ok) {
      const said = (await response.json().catch(() => ({}))) as { message?: string };
      throw new Error(said.message || `${response.status} ${response.statusText}`);
    }
  }

  private _ask(path: string, method: 'GET' | 'POST'): Promise<Response> {
    const url = URLExt.join(this._settings.baseUrl, 'monarch-kernel', 'api', path);
    return ServerConnection.makeRequest(url, { method }, this._settings);
  }
}
