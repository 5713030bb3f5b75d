"""Publishing a checkpoint on a model hub.

Place in the flow: behind `convert`. The client is huggingface_hub's, which comes with transformers and finds its own
login; it is imported where it is used, since nothing else here needs it.
"""

from __future__ import annotations

from pathlib import Path

from lilicorr.checkpoint.card import CARD
from lilicorr.checkpoint.store import read_checkpoint


def push_to_hub(folder: Path, repo_id: str, private: bool = False, endpoint: str | None = None) -> str:
    """Upload a checkpoint folder as the model `repo_id`, made if it does not exist; returns the commit's address.

    `endpoint` is another hub than the client's own. What does not load here is not published: ValueError as of
    `read_checkpoint`, for a folder without a model card, where nobody is logged in, and where the hub refuses or cannot
    be reached.
    """
    from huggingface_hub import HfApi, errors, get_token

    folder = Path(folder)
    description = read_checkpoint(folder).description
    if not (folder / CARD).is_file():
        raise ValueError(f"{folder / CARD} is missing: `convert` writes a checkpoint with its model card")
    if get_token() is None:
        raise ValueError("no login on the model hub: `hf auth login`, or set HF_TOKEN")
    api = HfApi(endpoint=endpoint)
    message = f"{description.head} draft model, drafts {description.spec.num_slots} tokens a block"
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    except (OSError, errors.HTTPError) as error:  # of the client's HTTP library, whichever its version has
        raise ValueError(f"{repo_id} was not published: {str(error).splitlines()[0]}") from error
    return str(commit.commit_url)
