"""What to do about each cause of a closed latch, for whoever is on call. One sentence or two each.

A closed latch never opens again: what is said here comes before a new run (``run.previous``).
"""

from __future__ import annotations

from typing import Final

GOING_ON: Final = (
    "Stop training, go back to the last accepted checkpoint, and start the sidecar on a new run "
    "directory with run.previous set to this one."
)

_CLIENT = (
    "Something sent /execute a request the pinned rollout does not send: compare sandbox_url and "
    "the rollout's code with the pinned ones"
)
_HELPER = "Look at the helper's own log"

REMEDIES: Final[dict[str, str]] = {
    # --- what came over HTTP
    "http_not_found": f"{_CLIENT}; its path was another.",
    "http_invalid_body": f"{_CLIENT}; its body was late, short or of no declared length.",
    "http_body_size": f"{_CLIENT}, or raise execute.body_bytes_max.",
    "http_content_type": f"{_CLIENT}; its body was not declared as JSON.",
    "http_bad_message": f"{_CLIENT}, and look for a proxy in between (NO_PROXY=127.0.0.1).",
    "http_busy": "More calls came at once than there is room for: raise execute.slots, "
    "execute.waiting_max or server.connections_max, or see why searches are slow.",
    "http_invalid_request": f"{_CLIENT}; its body was not strict JSON.",
    "invalid_native_request": f"{_CLIENT}; env or call differ (execute.environment).",
    "response_undelivered": "A rollout gave up before its answer: see whether searches or the disk "
    "are slow (the charts below), and whether a rollout process was killed.",
    "quota_exhausted": "The run has used what it was allowed: raise the quota named in the detail "
    "for the next run, after asking whether so much use was meant.",
    # --- retrieval
    "retrieval_failed": "The retrieval provider failed: look at its own log, and try it with "
    "`smartsearch-sidecar doctor`.",
    "identity_changed": "Corpus or index changed under the run: put the claimed ones back, and let "
    "nothing rebuild or replace them while a run is served.",
    "document_invalid": "The provider answered documents no rollout may see: repair its corpus.",
    "document_drift": "A document has other contents than earlier in this run: the retriever's "
    "corpus was changed, or several retrievers with different ones answer in turn.",
    "deadline": "A search took too long: see whether the retriever or this machine is overloaded; "
    "execute.deadline_seconds must stay under the rollout's own 10 seconds.",
    "request_cancelled": "The sidecar was stopped while it searched: stop the trainer first.",
    # --- ledger and restarts
    "ledger_failed": "The disk took no more: free space or mount it writable, and look at the "
    "kernel's log for I/O errors.",
    "unresolved_after_restart": "The process died with work in flight: find out why (memory, "
    "a signal, the node), because rollouts met that outage as text.",
    "unclean_restart": "The process died and came back: rollouts that asked meanwhile met an "
    "error as text. Find out why it died.",
    "internal_error": "The sidecar broke a promise of its own: keep the run directory and the log, "
    "and report both.",
    "operator": "Somebody closed this run by hand: the reason is in the detail.",
    # --- many nodes
    "cluster_unreachable": "The NATS servers were away for longer than cluster.lost_seconds, or a "
    "request could not wait for them: look at their logs and at the network to cluster.nats_url.",
    "cluster_unreadable": "Something else wrote to this run's keys: use one version on every node, "
    "and a cluster.run_id that no other run has.",
    "node_lost": "The node named in the detail was silent for cluster.lost_seconds, or never "
    "joined: look at its machine, its sidecar's log and its way to the NATS servers.",
    # --- rewards
    "reward_failed": "No reward could be given: the detail names the step.",
    "reward_cancelled": "The sidecar was stopped while it scored: stop the trainer first.",
    "reward_deadline": "A batch took longer than reward.deadline_seconds: see whether the helper "
    "is slow, or send fewer rows.",
    "reward_http_busy": "More reward requests came at once than there is room for: raise "
    "reward.slots or reward.waiting_max, or see why the helper is slow.",
    "reward_http_invalid_body": "A reward request arrived late, short or of no declared length.",
    "reward_http_body_size": "A reward request is too large: send fewer rows a batch.",
    "reward_http_content_type": "A reward request was not declared as JSON.",
    "reward_http_invalid_request": "A reward request was not strict JSON.",
    "invalid_reward_request": "A reward request is not of the documented shape: compare the "
    "trainer's integration file with this version's.",
    "reference_mismatch": "A rollout's question or answers are not in reward.references: point it "
    "at the files the trainer reads.",
    "no_user_turn": "Special tokens were lost: decode rollouts with skip_special_tokens=False.",
    "template_differs": "The scorer cannot read the rollout: chat template or decoding differ from "
    "the pinned trainer's.",
    "solution_too_long": "A rollout is over reward.max_input_bytes: raise it, or see why it is so "
    "long.",
    "source_changed": "The scorer's source changed on disk while the run was served: put the "
    "verified one back.",
    "scorer_failed": "The pinned scorer raised: the detail names where; compare checkout and data.",
    "nonfinite_reward": "The scorer gave no finite number: keep the rollout named in the journal.",
    "prompts_differ": "The scorer asked other prompts in its second pass: it is not the pinned "
    "one, or not deterministic; set reward.side_by_side = false.",
    "provenance_broken": "A rollout holds a result this run never gave: it met an error on the "
    "way. Look for a proxy, a timeout or a restart, and set NO_PROXY=127.0.0.1.",
    "verdicts_unparsed": "The helper writes neither 0 nor 1 too often, and each such verdict "
    "counts as correct: look at its answers with `ledger show`, and at its model and template.",
    # --- the helper
    "helper_failed": f"{_HELPER}: it did not answer as its protocol says.",
    "helper_unreachable": f"{_HELPER}: nothing takes connections at reward.helper.url.",
    "helper_transport": f"{_HELPER}: the connection broke.",
    "helper_timeout": f"{_HELPER}: it was slower than reward.helper.timeout_seconds.",
    "helper_status": f"{_HELPER}: it answered with an error status.",
    "helper_answer_invalid": f"{_HELPER}: its answer is not of the protocol's shape.",
    "helper_empty": f"{_HELPER}: an empty text would have counted as a correct round.",
    "helper_usage_missing": f"{_HELPER}: it must say how many tokens it read and wrote.",
    "helper_finish_reason": f"{_HELPER}: it stopped for a reason other than stop or length.",
    "helper_identity": "The helper serves another model than reward.helper declares: put the "
    "declared one back.",
    "helper_overlong": f"{_HELPER}: it ignored the limit of tokens it was given.",
    "helper_redirect": "The helper's address redirects: put the final one into reward.helper.url.",
    "helper_not_json": "What answers at reward.helper.url is no helper: a proxy or a login page.",
    "helper_truncated": f"{_HELPER}: it broke off in the middle of an answer.",
    "helper_not_sent": f"{_HELPER}: another call of the same batch failed first.",
}


def remedy(cause: str) -> str:
    """What to look at for ``cause``."""
    return REMEDIES.get(cause, "The detail names what happened; the journal and the log say more.")
