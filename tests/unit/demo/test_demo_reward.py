"""What the demo rewards, and what it asks."""

from __future__ import annotations

import pytest
from talking_support import word_tokenizer

from aengine.demo.questions import load_questions
from aengine.demo.reward import MAX_WORDS, reward

EIGHT_WORDS = "The capital of the French Republic is Paris."


@pytest.mark.parametrize(
    ("text", "finished", "worth"),
    [
        ("Paris.", True, 1.0),
        ("the capital is PARIS", True, 1.0),
        (EIGHT_WORDS, True, 1.0),
        (EIGHT_WORDS + " Yes.", True, 0.5),
        ("Paris, a city that", False, 0.2),
        (EIGHT_WORDS + " It lies on", False, 0.2),
        ("London.", True, 0.0),
        ("", True, 0.0),
        ("A Parisian.", True, 0.0),
        ("Comparison.", True, 0.0),
    ],
)
def test_reward_asks_for_the_answer_then_the_form(text: str, finished: bool, worth: float) -> None:
    assert len(EIGHT_WORDS.split()) == MAX_WORDS
    assert reward(text, finished, ["Paris"]) == pytest.approx(worth)


def test_any_of_the_answers_counts() -> None:
    assert [reward(text, True, ["7", "seven"]) for text in ("Seven.", "7 days", "17 days")] == [1.0, 1.0, 0.0]


def test_short_nonsense_is_worth_nothing() -> None:
    questions = load_questions()
    assert all(reward("Yes.", True, question.answers) == 0 for question in (*questions.train, *questions.held_out))


def test_there_are_sixteen_questions_and_others_held_out() -> None:
    questions = load_questions()
    asked = {question.question for question in questions.train}
    assert len(asked) == 16
    assert len(questions.held_out) >= 8
    assert asked.isdisjoint(question.question for question in questions.held_out)
    assert all(question.answers for question in (*questions.train, *questions.held_out))


def test_a_prompt_is_a_chat_that_the_model_is_to_answer() -> None:
    prompt = load_questions().train[0].prompt(word_tokenizer(), "hello")
    assert prompt[:4] == [1, 4, 0, 1]
    assert prompt[-2:] == [0, 2]
