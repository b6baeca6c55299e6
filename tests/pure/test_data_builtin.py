"""Data that needs no download."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data import StdlibText, TextFolder, TokenFile, builtin, digits
from shoal.errors import DataError


def test_digits_are_those_of_scikit_learn_split_without_overlap() -> None:
    from sklearn.datasets import load_digits

    train, test = digits(train=True), digits(train=False)
    assert (len(train), len(test)) == (1437, 360)
    images, labels = (torch.cat([train.tensors[part], test.tensors[part]]) for part in (0, 1))
    assert (images.dtype, images.shape[1:], labels.dtype) == (torch.float32, (1, 8, 8), torch.int64)
    ours = torch.cat([images.reshape(-1, 64) * 16, labels[:, None]], dim=1).tolist()
    bunch = load_digits()
    assert sorted(ours) == sorted(np.column_stack([bunch.data, bunch.target]).tolist())


def test_digits_are_the_same_every_time_and_every_class_is_tested() -> None:
    torch.manual_seed(1)
    first = digits(train=False).tensors
    torch.manual_seed(2)
    again = digits(train=False).tensors
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert first[1].bincount().min() >= 25
    assert first[0].min() == 0
    assert first[0].max() == 1


def test_digits_without_scikit_learn_name_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits()


def test_windows_of_the_standard_library_predict_the_next_byte() -> None:
    text = StdlibText(context=32)
    (inputs, targets), (following, _) = text[5], text[6]
    assert (inputs.dtype, inputs.shape, targets.shape) == (torch.int64, (32,), (32,))
    assert torch.equal(inputs[1:], targets[:-1])
    assert targets[-1] == following[0]
    assert bytes(torch.cat([text[index][0] for index in range(3)]).tolist()) == text.tokens[:96].tobytes()
    assert b"import" in text.tokens.tobytes()


def test_the_held_out_text_is_the_last_tenth() -> None:
    train, test = StdlibText(context=64), StdlibText(context=64, split="test")
    share_held_out = len(test.tokens) / (len(train.tokens) + len(test.tokens))
    assert share_held_out == pytest.approx(0.1, abs=0.001)
    assert len(train.tokens) + len(test.tokens) <= 4_000_000


def test_every_token_but_a_last_rest_is_predicted_once(tmp_path: Path) -> None:
    for num_tokens, num_windows in [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]:
        np.save(tmp_path / "tokens.npy", np.arange(num_tokens, dtype=np.uint16))
        windows = TokenFile(tmp_path / "tokens.npy", context=4, vocab_size=100)
        assert len(windows) == num_windows
        predicted = torch.cat([windows[index][1] for index in range(len(windows))])
        assert predicted.tolist() == list(range(1, 4 * num_windows + 1))


def test_a_window_past_the_end_is_an_index_error() -> None:
    text = StdlibText(context=1000)
    assert torch.equal(text[-1][0], text[len(text) - 1][0])
    with pytest.raises(IndexError):
        text[len(text)]
    with pytest.raises(IndexError):
        text[-len(text) - 1]


def test_a_folder_of_text_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, content in [("b.txt", "BBBB"), ("a.txt", "AAAA"), ("sub/c.txt", "CCCC"), ("d.md", "no")]:
        (tmp_path / name).write_text(content)
    text = TextFolder(tmp_path, context=2)
    assert text.tokens.tobytes() == b"AAAABBBBCCC"
    assert text.vocab_size == 256


def test_a_raw_token_file_is_mapped_not_read(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    windows = TokenFile(tmp_path / "tokens.bin", context=10, vocab_size=100)
    assert isinstance(windows.tokens, np.memmap)
    assert windows[3][0].tolist() == list(range(30, 40))


@pytest.mark.parametrize(
    ("tokens", "lesson"),
    [
        (np.zeros((2, 8), np.int64), r"int64 of shape \(2, 8\): tokens are one row"),
        (np.zeros(9), "float64 of shape"),
        (np.zeros(4, np.int64), "4 tokens do not fill one window of context 4, which needs 5"),
    ],
)
def test_a_file_that_holds_no_row_of_tokens_is_refused(tmp_path: Path, tokens: np.ndarray, lesson: str) -> None:
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(DataError, match=lesson):
        TokenFile(tmp_path / "tokens.npy", context=4, vocab_size=10)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no token file"):
        TokenFile(tmp_path / "none.bin", context=4, vocab_size=10)
    with pytest.raises(DataError, match=r"no file matches '\*\*/\*\.txt'"):
        TextFolder(tmp_path, context=4)
    with pytest.raises(DataError, match="split='valid' must be 'train' or 'test'"):
        StdlibText(context=4, split="valid")
    with pytest.raises(DataError, match="context=0 must be at least 1"):
        StdlibText(context=0)
