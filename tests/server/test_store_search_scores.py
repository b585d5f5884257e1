"""The scores of searches in vector stores, and the threshold for them."""

from __future__ import annotations

from pathlib import Path

from memory_client import MemoryClient, document, noop_memory
from server_process import running_server
from vector_models import embedder_path, noop_reranker


def test_a_reranker_with_negative_scores_drops_nothing_unless_a_threshold_is_sent(
    default_model_path: Path,
) -> None:
    """The scores of many cross-encoders are logits. Those of this reranker are from -1 to 1."""
    models = [*noop_memory(), noop_reranker(embedder_path())]
    with running_server(default_model_path, vector_models=models) as server:
        client = MemoryClient(server)
        store = client.create()
        client.attach(store, document(1, 100)[1])
        client.wait(store)

        def scores(**options: object) -> list[float]:
            found = client.search(store, document(1)[0], max_num_results=30, ranking_options=options)
            return [each["score"] for each in found]

        reranked = scores()
        assert len(reranked) == len(scores(ranker="none")) > 10
        assert reranked[0] > 0 > reranked[-1] and reranked == sorted(reranked, reverse=True)
        assert scores(score_threshold=0.0) == reranked
        assert scores(score_threshold=0.1) == [one for one in reranked if one >= 0.1]
